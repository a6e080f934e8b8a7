// Turns step records into cells and counts. It draws nothing and uses no network or clock, so that it is the same on the
// live page, in a report, and in Node, where a test compares its cells with the records.
"use strict";
(function (root) {
  const KIND = { IDLE: 0, PREFILL: 1, DECODE: 2, HELD: 3, PAUSED: 4 };
  const NAMES = ["idle", "prefill", "decode", "held", "paused"];
  const STEPS = ["useful", "padding", "held", "idle", "recomputed", "rejected"];
  const PHASE = { prefill: KIND.PREFILL, decode: KIND.DECODE, held: KIND.HELD, idle: KIND.PAUSED };
  const JOINED = 8, HIT = 16, LEFT = 32, OTHER = 64;
  const HUES = 8;
  // One step. The typed arrays have an element per slot: 3,000 steps of 64 slots stay small.
  class Column {
    constructor(record, slots) {
      this.n = record.n;
      this.t = record.t;
      this.seconds = record.seconds;
      this.end = record.t + record.seconds;
      this.policy = record.policy;
      this.queue = record.queue;
      this.blocked = record.blocked_by ?? ""; // why those that waited when it was planned did not join
      this.slots = slots;
      this.rows = record.rows ?? [0, slots]; // the slots of its engine; the others show what their engines did last (OTHER)
      this.pages = record.pages || { used: 0, total: 0 };
      this.steps = STEPS.map((name) => record.slot_steps[name] || 0);
      this.bits = new Uint8Array(slots); // the kind, and the flags above it
      this.parts = null; // shares of the rows that are padding, of 255, where there is any
      this.who = new Int32Array(slots); // the request's number; 0 is an empty slot
      this.done = new Uint16Array(slots);
      this.tokens = 0; // computed
      this.output = 0; // tokens of answers
      this.decodes = 0; // rows that decode
      this.masks = record.mask_seconds ?? 0; // of `seconds`, how long it waited for token masks
      this.experts = record.experts; // of a mixture: how many it read, of how many, over all layers
      this.drafts = new Map((record.drafts ?? []).map((drafts) => [drafts.id, drafts]));
      this.finished = 0;
      this.gaps = [];
      this.firsts = [];
      this.gapBefore = false;
    }

    kind(slot) {
      return this.bits[slot] & 7;
    }

    has(slot, flag) {
      return (this.bits[slot] & flag) !== 0;
    }

    part(slot) {
      return this.parts ? this.parts[slot] / 255 : 0;
    }
  }

  class Model {
    // `numbers` names requests that other models share: a request has the same number and color in each of them.
    constructor(least = 2000, numbers = null) {
      this.least = least;
      this.given = numbers;
      this.clear();
    }

    clear() {
      this.columns = [];
      this.requests = new Map(); // by number
      this.numbers = new Map(); // by id
      this.served = new Map(); // the server's numbers of requests that are not seen yet, the same on every page
      this.next = 1 + Math.max(0, ...(this.given?.values() ?? []));
      this.slots = 0;
      this.engines = new Map(); // of several on one queue: their names by their first slot
      this.lastGap = false;
      this.dropped = 0;
      this.version = (this.version || 0) + 1;
    }

    get last() {
      return this.columns[this.columns.length - 1];
    }

    request(id) {
      const known = this.numbers.get(id);
      if (known !== undefined) return this.requests.get(known);
      const number = this.given?.get(id) ?? this.numberOf(id);
      const request = {
        number, id, hue: this.given ? (number * 3) % HUES : -1, slot: -1, prompt: null, max: null, total: null, text: null,
        computed: 0, arrived: null, joined: null, joinedAt: 0, first: null, last: null, left: null,
        leftAt: null, reason: null, hit: 0, prefilled: null, phase: null, seen: 0, preempted: 0,
      };
      this.numbers.set(id, request.number);
      this.requests.set(request.number, request);
      return request;
    }

    // The server's number of a request. In a recording there are none, and requests are counted.
    numberOf(id) {
      const known = this.served.get(id);
      this.served.delete(id);
      if (known !== undefined && !this.requests.has(known)) {
        this.next = Math.max(this.next, known + 1);
        return known;
      }
      return this.next++;
    }

    // The server's numbers and queue at the time when a page connects.
    connected({ numbers = {}, waiting, upstreams }) {
      for (const [name, first] of upstreams ?? []) this.engines.set(first, name);
      for (const [id, number] of Object.entries(numbers)) this.number(id, number);
      for (const arrival of waiting) this.arrival(arrival);
    }

    number(id, number) {
      if (!this.numbers.has(id)) this.served.set(id, number);
    }

    // A request entered the queue.
    arrival(event) {
      if (event.number) this.number(event.id, event.number);
      const request = this.request(event.id);
      request.arrived = event.t;
      request.prompt = event.prompt_tokens;
      request.max = event.max_tokens;
      request.total = event.prompt_tokens + event.max_tokens;
      if (event.prompt !== undefined) request.text = event.prompt;
      this.version++;
    }

    // A request left outside a step: it was cancelled or timed out.
    departure(event) {
      const request = this.request(event.id);
      request.left = event.t;
      request.reason = event.reason;
      request.leftAt = this.last ? this.last.n : 0;
      this.version++;
    }

    gap() {
      this.lastGap = true;
    }

    // Choose the hue that the fewest running requests have, so that neighbors differ, and not that of the one before in the slot.
    pickHue(request, members, before) {
      const used = new Array(HUES).fill(0);
      if (before?.hue >= 0) used[before.hue] = members.length;
      for (const member of members) {
        const other = this.requests.get(this.numbers.get(member.id));
        if (other && other.hue >= 0) used[other.hue]++;
      }
      let best = request.number % HUES;
      for (let i = 0; i < HUES; i++) {
        const hue = (request.number * 3 + i) % HUES;
        if (used[hue] < used[best]) best = hue;
      }
      request.hue = best;
    }

    add(record) {
      const last = this.last;
      if (last && record.n <= last.n) return;
      let slots = Math.round(STEPS.reduce((sum, name) => sum + (record.slot_steps[name] || 0), 0));
      for (const member of record.members) slots = Math.max(slots, member.slot + 1);
      if (record.rows) {
        slots = Math.max(this.slots, record.rows[1]);
        if (!this.engines.has(record.rows[0])) this.engines.set(record.rows[0], "");
      }
      this.slots = Math.max(this.slots, slots);
      const column = new Column(record, slots);
      column.gapBefore = this.lastGap;
      this.lastGap = false;
      if (record.rows && last) this.carry(last, column);
      const padded = column.steps[1] > 0;
      const joined = new Set(record.joined);
      const wrong = new Map((record.drafts ?? []).map((own) => [own.id, own.drafted - own.accepted])); // draft tokens
      let most = 0;
      for (const member of record.members) most = Math.max(most, member.tokens);
      for (const member of record.members) {
        const request = this.request(member.id);
        if (request.hue < 0) this.pickHue(request, record.members, this.requests.get(last?.who[member.slot]));
        const slot = member.slot;
        const kind = PHASE[member.phase] ?? KIND.PAUSED;
        column.bits[slot] = kind;
        column.who[slot] = request.number;
        request.seen = record.n;
        column.done[slot] = Math.min(65535, member.computed);
        if (padded && (kind === KIND.PREFILL || kind === KIND.DECODE)) {
          column.parts ??= new Uint8Array(slots);
          column.parts[slot] = Math.round(255 * (1 - member.tokens / most));
        }
        if (joined.has(member.id)) {
          column.bits[slot] |= JOINED;
          const hit = member.computed - member.tokens;
          if (hit > 0 && kind === KIND.PREFILL) {
            column.bits[slot] |= HIT;
            request.hit = hit;
          }
          if (request.joined === null) {
            request.joined = record.t;
            request.joinedAt = record.n;
          }
        }
        this.advance(request, member, kind, column, wrong.get(member.id) ?? 0);
      }
      for (const id of record.displaced ?? []) this.request(id).preempted++; // it lost its slot, and waits again
      for (const gone of record.left) this.leave(gone, column);
      this.columns.push(column);
      this.version++;
      if (this.columns.length > this.keep + 256) this.forget();
    }

    // Other engines are in the middle of their own steps.
    carry(last, column) {
      for (let slot = 0; slot < last.slots; slot++) {
        const isOwn = slot >= column.rows[0] && slot < column.rows[1];
        const request = this.requests.get(last.who[slot]);
        if (isOwn || !request || last.has(slot, LEFT) || (request.leftAt !== null && request.leftAt <= last.n)) continue;
        column.who[slot] = last.who[slot];
        column.done[slot] = last.done[slot];
        column.bits[slot] = last.kind(slot) | OTHER;
        request.seen = column.n;
      }
    }

    // The number of steps to keep: fewer when there are many slots.
    get keep() {
      return Math.max(this.least, Math.min(6000, Math.floor(150000 / Math.max(1, this.slots))));
    }

    // Record a request's new tokens: one with the last step of its prompt, then those of each decode that are not wrong.
    advance(request, member, kind, column, wrong) {
      column.tokens += member.tokens;
      if (kind === KIND.DECODE) {
        if (request.phase === KIND.PREFILL) this.firstToken(request, column);
        const tokens = Math.max(1, member.tokens - wrong);
        column.output += tokens;
        column.decodes++;
        const gap = request.last === null ? null : (column.end - request.last) / tokens;
        for (let k = 0; gap !== null && k < tokens; k++) column.gaps.push(gap);
        request.last = column.end;
      } else if (kind === KIND.PREFILL) {
        request.prefilled = column.end;
      }
      if (kind === KIND.PREFILL || kind === KIND.DECODE) request.phase = kind;
      request.computed = member.computed;
      request.total = request.total ?? member.total;
      request.slot = member.slot;
      if (request.joined === null) {
        request.joined = column.t;
        request.joinedAt = column.n;
      }
    }

    // A prompt is known to be finished when the first decode follows it, or when the request leaves. Recomputing after
    // a preemption ends with the next token, not with the first.
    firstToken(request, column) {
      request.phase = KIND.DECODE;
      column.output += 1;
      if (request.first !== null) column.gaps.push(request.prefilled - request.last);
      else {
        request.first = request.prefilled;
        if (request.arrived !== null) column.firsts.push(request.first - request.arrived);
      }
      request.last = request.prefilled;
    }

    leave(gone, column) {
      const request = this.request(gone.id);
      if (request.phase === KIND.PREFILL) this.firstToken(request, column);
      request.left = column.end;
      request.leftAt = column.n;
      request.reason = gone.reason;
      column.finished++;
      if (request.slot >= 0 && column.who[request.slot] === request.number) {
        column.bits[request.slot] |= LEFT;
      }
    }

    // Drop the oldest steps, and the requests that only they showed.
    forget() {
      this.dropped += this.columns.length - this.keep;
      this.columns.splice(0, this.columns.length - this.keep);
      const oldest = this.columns[0].n;
      for (const [number, request] of this.requests) {
        if (request.leftAt !== null && Math.max(request.leftAt, request.seen) < oldest) {
          this.requests.delete(number);
          this.numbers.delete(request.id);
        }
      }
    }

    // The index of the step with number n, or of the last one before it.
    indexOf(n) {
      let low = 0, high = this.columns.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (this.columns[middle].n <= n) low = middle;
        else high = middle - 1;
      }
      return high < 0 ? -1 : low;
    }

    // The index of the last step that had begun at time t.
    indexAt(t) {
      let low = 0, high = this.columns.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (this.columns[middle].t <= t) low = middle;
        else high = middle - 1;
      }
      return high < 0 ? -1 : low;
    }

    // Count the cells of each kind and the slot-steps of the five kinds over columns from..to.
    count(from = 0, to = this.columns.length) {
      const cells = { idle: 0, prefill: 0, decode: 0, held: 0, paused: 0, hits: 0, joined: 0, left: 0 };
      const steps = Object.fromEntries(STEPS.map((name) => [name, 0]));
      for (let i = Math.max(0, from); i < to; i++) {
        const column = this.columns[i];
        for (let slot = 0; slot < column.slots; slot++) {
          cells[NAMES[column.kind(slot)]]++;
          if (column.has(slot, HIT)) cells.hits++;
          if (column.has(slot, JOINED)) cells.joined++;
          if (column.has(slot, LEFT)) cells.left++;
        }
        STEPS.forEach((name, k) => (steps[name] += column.steps[k]));
      }
      return { cells, steps };
    }

    // The values of the tiles at the end of the step at `index`, over the `seconds` before it. Live, `at` is the current
    // time: while nothing is computed, rates fall and nothing runs.
    tiles(index, seconds = 10, at = null) {
      const now = this.columns[index];
      if (!now) return null;
      const end = at === null ? now.end : Math.max(at, now.end);
      let from = index + 1;
      while (from > 0 && this.columns[from - 1].end > end - seconds) from--;
      if (from > index) return this.still(now);
      const gaps = [], firsts = [];
      let output = 0, rows = 0, busy = 0, most = 0, decodes = 0, drafted = 0, accepted = 0;
      for (let i = from; i <= index; i++) {
        const column = this.columns[i];
        output += column.output;
        for (const gap of column.gaps) gaps.push(gap);
        for (const first of column.firsts) firsts.push(first);
        const own = column.rows[1] - column.rows[0];
        rows += own - column.steps[3];
        most += own;
        busy += column.seconds;
        decodes += column.decodes;
        for (const drafts of column.drafts.values()) {
          drafted += drafts.drafted;
          accepted += drafts.accepted;
        }
      }
      const span = Math.max(end - this.columns[from].t, 1e-9);
      busy /= Math.max(1, this.engines.size);
      const running = this.running(now, at !== null);
      const { steps } = this.count(from, index + 1);
      const all = STEPS.reduce((sum, name) => sum + steps[name], 0) || 1;
      return {
        running, waiting: now.queue, slots: now.slots, steps: index - from + 1, span,
        tokensPerSecond: output / span, busy: busy / span, fill: most ? rows / most : 0,
        stepSeconds: (busy * Math.max(1, this.engines.size)) / (index - from + 1),
        itl50: percentile(gaps, 50), itl99: percentile(gaps, 99),
        ttft50: percentile(firsts, 50), ttft99: percentile(firsts, 99), answered: firsts.length,
        waste: Object.fromEntries(STEPS.map((name) => [name, steps[name] / all])),
        pages: now.pages, gaps: gaps.length, drafted,
        acceptance: drafted ? accepted / drafted : null, tokensPerStep: decodes ? 1 + accepted / decodes : null,
      };
    }

    // The tiles when nothing has been computed for a while.
    still(now) {
      return {
        running: this.running(now, true), waiting: now.queue, slots: now.slots, steps: 0, span: 0,
        tokensPerSecond: 0, busy: 0, fill: 0, stepSeconds: 0, itl50: null, itl99: null, ttft50: null,
        ttft99: null, answered: 0, waste: null, pages: now.pages, gaps: 0, drafted: 0, acceptance: null, tokensPerStep: null,
      };
    }

    // The number of requests in slots during a step, or still there after it.
    running(column, after = false) {
      let running = 0;
      for (let slot = 0; slot < column.slots; slot++) {
        const request = this.requests.get(column.who[slot]);
        const gone = request && request.leftAt !== null && request.leftAt <= column.n;
        if (column.who[slot] && !(after && gone)) running++;
      }
      return running;
    }

    // The requests that run, wait and have left when the step at `index` ends; `live` includes later arrivals.
    requestsAt(index, { most = 60, live = false } = {}) {
      const now = this.columns[index];
      const running = [], waiting = [], left = [];
      const seen = new Set();
      if (now) {
        for (let slot = 0; slot < now.slots; slot++) {
          const request = this.requests.get(now.who[slot]);
          if (!request) continue;
          const gone = request.leftAt !== null && request.leftAt <= now.n;
          if (gone && (live || request.leftAt < now.n)) continue;
          seen.add(request.number);
          running.push({ request, slot, state: NAMES[now.kind(slot)], done: now.done[slot] });
        }
      }
      for (const request of this.requests.values()) {
        if (seen.has(request.number)) continue;
        const came = live || !now || request.arrived === null || request.arrived <= now.end;
        if (request.left !== null && (live || !now || request.leftAt <= now.n)) {
          left.push({ request, slot: -1, state: "finished", done: request.computed });
        } else if (came && (request.arrived !== null || (request.joinedAt && now && request.joinedAt <= now.n))) {
          const again = request.preempted > 0;
          waiting.push({ request, slot: -1, state: again ? "preempted" : "waiting", done: again ? request.computed : 0 });
        }
      }
      left.sort((a, b) => b.request.left - a.request.left);
      waiting.sort((a, b) => a.request.arrived - b.request.arrived);
      return { running, waiting: waiting.slice(0, most), left: left.slice(0, most), waitingCount: waiting.length };
    }
  }

  // Linear interpolation, as in NumPy; null for no values.
  function percentile(values, q) {
    if (!values.length) return null;
    const ordered = Float64Array.from(values).sort();
    const place = ((ordered.length - 1) * q) / 100;
    const low = Math.floor(place);
    const high = Math.min(low + 1, ordered.length - 1);
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low);
  }

  const EB = (root.EB = root.EB || {});
  Object.assign(EB, { KIND, NAMES, STEPS, JOINED, HIT, LEFT, OTHER, HUES, Model, percentile });
  if (typeof module === "object" && module.exports) module.exports = EB;
})(globalThis);
