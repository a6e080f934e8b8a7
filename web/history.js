// What the steps that the page still has tell about one request: in which it waited and why, what it did in its slot, and
// which requests were in the batch with it.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});

  // `complete` is whether the page has all steps since the request arrived.
  function historyOf(model, request) {
    const { columns } = model;
    const first = columns[0];
    const since = request.arrived ?? request.joined;
    return {
      complete: !first || since === null || first.t <= since || first.n === 1,
      oldest: first?.n ?? 0,
      waits: waitsOf(model, request),
      ...batchOf(model, request),
    };
  }

  // The steps in which it waited, those of one reason after another together:
  // [{ reason, from, to, steps, seconds, joined, taken, held, slots, pages }], the last four as at the last of these steps,
  // and `joined` the number of requests that joined in them.
  function waitsOf(model, request) {
    const { columns } = model;
    if (request.arrived === null) return [];
    const until = request.joinedAt || (request.left !== null ? request.leftAt + 1 : Infinity);
    let at = Math.max(0, model.indexAt(request.arrived));
    if (columns[at] && columns[at].end <= request.arrived) at++;
    const groups = [];
    for (let i = at; i < columns.length && columns[i].n < until; i++) {
      const column = columns[i];
      const arrives = column.t < request.arrived; // during this step
      const reason = column.blocked || (arrives ? "in_progress" : "waited");
      let group = groups[groups.length - 1];
      if (group?.reason !== reason) groups.push((group = { reason, from: column.n, steps: 0, seconds: 0, joined: 0 }));
      group.to = column.n;
      group.steps++;
      group.seconds += arrives ? column.end - request.arrived : column.seconds;
      const { joined, ...slots } = slotsOf(column);
      group.joined += joined;
      Object.assign(group, slots, { slots: column.slots, pages: column.pages });
    }
    return groups;
  }

  function slotsOf(column) {
    let taken = 0, held = 0, joined = 0;
    for (let slot = 0; slot < column.slots; slot++) {
      if (column.who[slot]) taken++;
      if (column.kind(slot) === EB.KIND.HELD) held++;
      if (column.has(slot, EB.JOINED)) joined++;
    }
    return { taken, held, joined };
  }

  // What it did in its slot, step by step, with whom, and who had the slot before.
  function batchOf(model, request) {
    const { columns } = model;
    const steps = { prefill: 0, decode: 0, held: 0, paused: 0 };
    const shared = new Map();
    let own = 0, held = 0, before = null;
    const from = request.joinedAt ? model.indexOf(request.joinedAt) : Infinity;
    for (let i = from; i < columns.length && columns[i].n <= (request.leftAt ?? Infinity); i++) {
      const column = columns[i];
      const slot = column.who.indexOf(request.number);
      if (slot < 0 || column.has(slot, EB.OTHER)) continue; // it was preempted, and waits again, or another engine's step
      own++;
      steps[EB.NAMES[column.kind(slot)]]++;
      if (column.kind(slot) === EB.KIND.HELD) held += column.seconds;
      if (column.n === request.joinedAt) before = leaver(model, columns[i - 1], slot);
      for (let other = 0; other < column.slots; other++) {
        const number = column.who[other];
        if (number && number !== request.number && !column.has(other, EB.OTHER)) shared.set(number, (shared.get(number) ?? 0) + 1);
      }
    }
    const neighbors = [...shared].map(([number, together]) => ({ request: model.requests.get(number), number, together }));
    neighbors.sort((a, b) => b.together - a.together || a.number - b.number);
    return { own, steps, held, before, neighbors };
  }

  // The request that left a slot in this step, if one did.
  function leaver(model, column, slot) {
    const number = column && slot < column.slots && column.has(slot, EB.LEFT) ? column.who[slot] : 0;
    return number ? { number, n: column.n } : null;
  }

  Object.assign(EB, { historyOf });
})(globalThis);
