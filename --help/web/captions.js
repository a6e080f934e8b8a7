// Says in one line what a step did, and chooses what to say when steps are faster than a reader. It reads the model's
// columns and nothing else, and claims only what they show. It draws nothing and knows no network or clock.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { KIND, JOINED, HIT, LEFT } = EB;
  // Loops that take requests strictly by their order; others choose among those that wait.
  const IN_LINE = new Set(["nobatch", "static", "dynamic", "chunked", "elastic", "impatient", "window", "fixed", "adaptive"]);
  const LONG_PROMPT = 64; // tokens; a shorter prompt computed whole is not worth a caption
  const FRESH = 1.2; // seconds for which a step stays worth a caption
  const BUSY = 40; // steps a second, from which a caption sums up instead of picking one step
  const QUIET = 12; // seconds between two announcements to a screen reader

  const plural = (count, word) => `${EB.count(count)} ${word}${count === 1 ? "" : "s"}`;
  const ordinal = (n) => {
    const tens = n % 100 >= 11 && n % 100 <= 13;
    return `${n}${tens ? "th" : { 1: "st", 2: "nd", 3: "rd" }[n % 10] || "th"}`;
  };

  // "#7", "#7 and #9", "#7, #8 and #9", "#9 to #16", or the first two and the number of the others.
  function list(names) {
    const numbers = [...names].sort((a, b) => a - b);
    const last = numbers.length - 1;
    if (last > 1 && numbers[last] - numbers[0] === last) return `#${numbers[0]} to #${numbers[last]}`;
    if (last > 2) return `#${numbers[0]}, #${numbers[1]} and ${last - 1} more`;
    return numbers.map((n) => `#${n}`).join(", ").replace(/, ([^,]*)$/, " and $1");
  }

  // Which client of the demonstration's load a request belongs to, which its id says.
  function clientOf(request) {
    return /^(quiet|loud)-\d+$/.exec(request?.id ?? "")?.[1] ?? "";
  }

  function name(model, number) {
    const client = clientOf(model.requests.get(number));
    return client ? `#${number} (${client})` : `#${number}`;
  }

  // What a step and the one before it show, as the sentences below need it.
  class Scene {
    // `closed`: the loops that admit no request while a batch runs.
    constructor(model, index, closed) {
      this.model = model;
      this.now = model.columns[index];
      const before = model.columns[index - 1];
      this.before = before && before.n === this.now.n - 1 ? before : null;
      const { loop, order } = EB.partsOf(this.now.policy);
      this.loop = loop;
      this.isInLine = order === "fcfs" && IN_LINE.has(loop);
      this.isClosed = closed.has(loop);
      this.slots = Array.from({ length: this.now.slots }, (_, slot) => slot);
      this.taken = this.slots.filter((slot) => this.now.who[slot]);
      this.joined = this.taken.filter((slot) => this.now.has(slot, JOINED));
      this.full = this.taken.length === this.now.slots;
      this.left = this.taken.filter((slot) => this.now.has(slot, LEFT));
      this.decoding = this.taken.filter((slot) => this.now.kind(slot) === KIND.DECODE);
    }

    request(slot, column = this.now) {
      return this.model.requests.get(column.who[slot]);
    }

    name(slot) {
      return name(this.model, this.now.who[slot]);
    }

    // Requests that had come by this step and are not in it, the first to come first.
    get waiting() {
      const { now } = this;
      this.line ??= [...this.model.requests.values()]
        .filter((r) => r.arrived !== null && r.arrived <= now.t && !(r.leftAt !== null && r.leftAt <= now.n)
          && !now.who.includes(r.number))
        .sort((a, b) => a.arrived - b.arrived);
      return this.line;
    }

    // Who had the slot in the step before and left after it, or 0.
    leftFrom(slot) {
      const { before } = this;
      return before && slot < before.slots && before.has(slot, LEFT) ? before.who[slot] : 0;
    }

    // Whether no more could run in the step before.
    get wasFull() {
      const { before } = this;
      if (!before) return false;
      const taken = before.who.reduce((sum, number) => sum + (number > 0), 0);
      return taken === before.slots || (this.loop === "nobatch" && taken > 0 && before.policy === this.now.policy);
    }
  }

  const SENTENCES = [switched, ended, began, held, joined, chunk, longPrompt, paused, closedSlot, waits, lost, stopped, gone];

  // The sentences that are true of a step, each with its kind, weight and the slots it is about.
  function captionsOf(model, index, closed = new Set()) {
    const column = model.columns[index];
    if (!column) return [];
    const scene = new Scene(model, index, closed);
    return SENTENCES.flatMap((sentence) => sentence(scene) ?? []).map((said) => ({ n: column.n, ...said }));
  }

  function switched({ before, now, taken, joined }) {
    if (!before || before.policy === now.policy) return null;
    const stay = taken.length - joined.length;
    const more = stay ? `; ${plural(stay, "running request")} ${stay === 1 ? "goes" : "go"} on` : "";
    return { kind: "switch", weight: 100, text: `from here on: ${now.policy}${more}`, slots: [] };
  }

  // All that ran leave together.
  function ended({ model, now, left, taken, isClosed }) {
    if (!isClosed || left.length < 2 || left.length < taken.length) return null;
    const began = Math.min(...left.map((slot) => model.requests.get(now.who[slot])?.joinedAt || now.n));
    const from = model.indexOf(began);
    const first = model.columns[from];
    const size = first?.who.reduce((sum, number) => sum + (number > 0), 0);
    if (first?.n !== began || first.policy !== now.policy) return null; // it began before what is known, or otherwise
    const { cells } = model.count(from, model.indexOf(now.n) + 1);
    const rows = cells.prefill + cells.decode + cells.held;
    const share = cells.held ? `: ${cells.held} of its ${rows} rows were held, without a token` : "";
    return { kind: "ended", weight: 9, text: `the batch of ${size} ends${share}`, slots: left };
  }

  function began({ now, joined, isClosed, taken, model }) {
    if (!isClosed || joined.length < 2 || joined.length < taken.length) return null;
    const names = list(joined.map((slot) => now.who[slot]));
    const waiting = now.queue ? `; ${plural(now.queue, "request")} must wait until it ends` : "";
    return { kind: "began", weight: 8, text: `a batch of ${joined.length} begins: ${names}${waiting}`, slots: joined };
  }

  // Finished requests whose slots stay taken.
  function held(scene) {
    const { now, before, taken, left } = scene;
    if (!before || left.length) return null;
    const is = taken.filter((slot) => now.kind(slot) === KIND.HELD);
    const fresh = is.filter((slot) => before.who[slot] === now.who[slot] && before.kind(slot) !== KIND.HELD);
    const running = taken.filter((slot) => now.kind(slot) !== KIND.HELD);
    if (!fresh.length || !running.length) return null;
    const names = list(fresh.map((slot) => now.who[slot]));
    const [is_, its] = fresh.length === 1 ? ["is", "its slot is"] : ["are", "their slots are"];
    const rest = (slot) => (scene.request(slot)?.total ?? 0) - now.done[slot] - 1;
    const last = running.reduce((a, b) => (rest(b) > rest(a) ? b : a));
    const until = running.length === 1 ? `${scene.name(last)} ends` : "the batch ends";
    const more = running.length > 1 && rest(last) > 0 ? `; ${scene.name(last)} may need ${plural(rest(last), "more token")}` : "";
    return {
      kind: "held", weight: 7, slots: [...fresh, last], text: `${names} ${is_} done, but ${its} held until ${until}${more}`,
    };
  }

  // One sentence for each request that joined a slot.
  function joined(scene) {
    const { now, before, isClosed } = scene;
    if (isClosed && scene.joined.length > 1) return null;
    return scene.joined.map((slot) => {
      const request = scene.request(slot);
      const who = scene.name(slot);
      if (!request) return null;
      if (request.joinedAt !== now.n) {
        return { kind: "back", weight: 6, slots: [slot], text: `${who} is back, in slot ${slot}, and computes its tokens again` };
      }
      const gone = scene.leftFrom(slot);
      const waited = before && request.arrived !== null && request.arrived <= before.t;
      let why = gone ? ` after #${gone} left` : "";
      if (waited && gone && scene.wasFull) why = ` because #${gone} left`;
      else if (!gone && before && !waited && request.arrived !== null) why = " as soon as it came";
      const earlier = scene.waiting.filter((other) => other.arrived < request.arrived).length;
      const isFirst = scene.waiting.every((other) => other.arrived > request.arrived || (other.arrived === request.arrived && other.number > request.number));
      const chosen = isFirst ? "" : extreme(request, scene.waiting);
      const reason = chosen && (why ? ` and it was ${chosen}` : `, ${chosen}`);
      const ahead = earlier ? `${reason}, ahead of ${earlier} that came before it` : reason;
      const hit = now.has(slot, HIT)
        ? `: ${request.hit} of its ${request.prompt ?? request.hit} prompt tokens were cached` : "";
      const weight = (hit ? 7 : 4) + (ahead ? 3 : 0) + (clientOf(request) === "quiet" ? 4 : 0);
      return {
        kind: hit ? "hit" : earlier ? "ahead" : "joined", weight, slots: [slot],
        text: `${who} joined slot ${slot}${hit && !ahead ? "" : why}${ahead}${hit}`,
      };
    }).filter(Boolean);
  }

  // What sets a request apart from those that still wait, if its length does.
  function extreme(request, waiting) {
    const compare = (isFirst) => request.max !== null && waiting.every(({ max }) => max !== null && isFirst(request.max, max));
    const name = compare((own, other) => own < other) ? "shortest" : compare((own, other) => own > other) ? "longest" : "";
    return name && `the ${name} of ${waiting.length + 1}`;
  }

  // A part of a prompt, of which more is to come or some came before.
  function chunk(scene) {
    const { now, before } = scene;
    return scene.taken.map((slot) => {
      const request = scene.request(slot);
      if (now.kind(slot) !== KIND.PREFILL || !request || request.prompt === null || request.preempted || request.hit) return null;
      const had = now.has(slot, JOINED) ? 0 : before?.who[slot] === now.who[slot] ? before.done[slot] : null;
      if (had === null || (now.done[slot] >= request.prompt && !had)) return null;
      const others = scene.decoding.length ? `; ${plural(scene.decoding.length, "other")} got a token meanwhile` : "";
      const what = now.done[slot] < request.prompt ? `reads its prompt in chunks: ${now.done[slot]} of ${request.prompt} tokens so far`
        : `has read its prompt of ${request.prompt} tokens in chunks`;
      return { kind: "chunk", weight: 6, slots: [slot], text: `${scene.name(slot)} ${what}${others}` };
    }).find(Boolean);
  }

  // A step that a whole long prompt made much longer than the others.
  function longPrompt(scene) {
    const { model, now, before } = scene;
    const slot = scene.joined.find((s) => now.kind(s) === KIND.PREFILL && now.done[s] - (scene.request(s)?.hit ?? 0) >= LONG_PROMPT
      && now.done[s] >= (scene.request(s)?.prompt ?? Infinity));
    if (slot === undefined || !before) return null;
    const index = model.indexOf(now.n);
    const usual = EB.percentile(model.columns.slice(Math.max(0, index - 60), index).map((column) => column.seconds), 50);
    if (now.seconds < 1.5 * usual || !scene.decoding.length) return null;
    return {
      kind: "long", weight: 9, slots: [slot],
      text: `${scene.name(slot)}'s prompt of ${scene.request(slot).prompt} tokens made this step last ${EB.seconds(now.seconds)}, `
        + `not ${EB.seconds(usual)}; ${plural(scene.decoding.length, "other")} waited`,
    };
  }

  function paused({ now, taken }) {
    const rest = taken.filter((slot) => now.kind(slot) === KIND.PAUSED);
    const prompts = taken.filter((slot) => now.kind(slot) === KIND.PREFILL);
    if (!rest.length || !prompts.length) return null;
    const whose = list(prompts.map((slot) => now.who[slot]));
    return { kind: "paused", weight: 5, slots: rest, text: `${plural(rest.length, "request")} got no token while ${whose} read a prompt` };
  }

  // A slot that is empty although requests wait, because the batch is closed.
  function closedSlot({ loop, isClosed, slots, before, now, taken, ...scene }) {
    if (!isClosed || loop === "nobatch" || !before || !now.queue || !taken.length || before.policy !== now.policy) return null;
    const slot = slots.find((s) => !now.who[s] && before.who[s] && before.has(s, LEFT));
    if (slot === undefined) return null;
    return {
      kind: "closed", weight: 7, slots: [slot],
      text: `#${before.who[slot]} left, but slot ${slot} stays empty until the batch ends: ${loop} takes nobody in before`,
    };
  }

  // Somebody came and found no place.
  function waits(scene) {
    const { now, before, isClosed, loop, full, taken } = scene;
    if (!before || !taken.length) return null;
    const line = scene.waiting;
    const place = line.findLastIndex((request) => request.arrived > before.t);
    if (place < 0) return null;
    const known = line.length === now.queue && line.every((request) => !request.preempted);
    const where = scene.isInLine && known ? ` (${ordinal(place + 1)} in line)` : line.length > 1 ? ` with ${plural(line.length - 1, "other")}` : "";
    const who = name(scene.model, line[place].number);
    const because = loop === "nobatch" ? `one at a time: ${who} waits for its turn${where}`
      : isClosed ? `the batch is closed: ${who} waits until it ends${where}`
      : full ? `batch full: ${who} waits for a slot${where}` : `${who} waits${where}`;
    return { kind: "waits", weight: full || isClosed ? 5 : 3, slots: [], text: because };
  }

  function lost({ model, before, now, slots }) {
    if (!before) return null;
    const slot = slots.find((s) => {
      const number = s < before.slots ? before.who[s] : 0;
      const request = model.requests.get(number);
      return number && !before.has(s, LEFT) && !now.who.includes(number) && request?.preempted && request.leftAt === null;
    });
    if (slot === undefined) return null;
    return { kind: "lost", weight: 9, slots: [slot], text: `${name(model, before.who[slot])} lost slot ${slot} and waits again` };
  }

  function stopped(scene) {
    const slot = scene.left.find((s) => !["length", "stop", null, undefined].includes(scene.request(s)?.reason));
    if (slot === undefined) return null;
    return { kind: "stopped", weight: 8, slots: [slot], text: `${scene.name(slot)} ended early: ${scene.request(slot).reason}` };
  }

  function gone({ now, left, isClosed, ...scene }) {
    if (!left.length || isClosed || now.queue) return null;
    const names = list(left.map((slot) => now.who[slot]));
    const free = left.length === 1 ? `slot ${left[0]} is free` : `slots ${left.join(" and ")} are free`;
    return { kind: "gone", weight: 2, slots: left, text: `${names} ${left.length === 1 ? "is" : "are"} done: ${free}, and nobody waits` };
  }

  // What happened in columns from..to, for steps that are too fast to tell apart.
  function summaryOf(model, from, to) {
    const columns = model.columns.slice(from, to + 1);
    if (!columns.length) return null;
    const { cells } = model.count(from, to + 1);
    const seconds = columns[columns.length - 1].end - columns[0].t;
    const rows = (cells.prefill + cells.decode + cells.held) / columns.length;
    const most = Math.max(...columns.map((column) => column.queue));
    const parts = [`${EB.count(cells.joined)} joined`, `${EB.count(cells.left)} left`, `up to ${EB.count(most)} waited`, `batch of ${rows.toFixed(1)} on average`];
    if (cells.held) parts.push(`${Math.round((100 * cells.held) / (cells.prefill + cells.decode + cells.held))} % of rows held`);
    return {
      n: columns[columns.length - 1].n, kind: "summary", weight: 1, slots: [],
      text: `${plural(columns.length, "step")} in ${EB.seconds(seconds)}: ${parts.join(", ")}`,
    };
  }

  // Chooses a caption and leaves it for as long as it takes to read.
  class Narrator {
    constructor() {
      this.closed = new Set();
      this.clear();
    }

    clear() {
      this.shown = null;
      this.shownAt = 0;
      this.looked = null; // number of the last step when a caption was chosen
      this.until = 0;
      this.told = -1; // number of the last step that was looked at
      this.recent = []; // captions to choose from
      this.kinds = []; // those shown last
      this.announcedAt = -Infinity;
    }

    // The caption at `now` (seconds) when the step at `index` is the last shown. `exact`: say what that step did.
    at(model, index, now, exact = false) {
      const column = model.columns[index];
      if (!column) return (this.shown = null);
      if (exact) return (this.shown = this.ofStep(model, index) ?? this.shown);
      if (this.shown && column.n < this.shown.n) this.clear(); // another run, or an earlier moment
      if (now < this.until) {
        this.look(model, index, now);
        return this.shown;
      }
      const first = this.looked ?? column.n;
      this.look(model, index, now);
      const from = model.indexOf(first);
      const isBusy = index - from > BUSY * Math.max(now - this.shownAt, 1);
      const next = isBusy ? summaryOf(model, from, index) : this.choose();
      if (next) this.show(next, now);
      else if (now > this.until + 4 && this.shown?.kind !== "calm") this.show(this.calm(model, index), now);
      this.looked = column.n;
      return this.shown;
    }

    // All of one step, the most telling first.
    ofStep(model, index) {
      const said = captionsOf(model, index, this.closed).sort((a, b) => b.weight - a.weight);
      return said[0] ?? this.calm(model, index);
    }

    look(model, index, now) {
      const last = model.columns[index].n;
      this.recent = this.recent.filter((caption) => caption.seen > now - FRESH);
      const begin = Math.max(this.told + 1, last - 30); // the older ones are not fresh
      this.told = Math.max(this.told, last);
      for (let i = Math.max(0, model.indexOf(begin)); i <= index; i++) {
        if (model.columns[i].n < begin) continue;
        for (const caption of captionsOf(model, i, this.closed)) this.recent.push({ ...caption, seen: now });
      }
    }

    // The most telling of the recent ones; a kind that was just shown counts less.
    choose() {
      const stale = (kind) => this.kinds.filter((other) => other === kind).length * 3;
      const worth = ({ weight, kind }) => weight - stale(kind);
      const best = this.recent.reduce((a, b) => (!a || worth(b) >= worth(a) ? b : a), null);
      this.recent = [];
      return best;
    }

    show(caption, now) {
      this.shown = caption;
      this.shownAt = now;
      this.until = now + Math.max(2.6, 0.055 * caption.text.length);
      this.kinds = [...this.kinds, caption.kind].slice(-3);
    }

    calm(model, index) {
      const column = model.columns[index];
      const count = (kind) => column.who.reduce((sum, number, slot) => sum + (number > 0 && column.kind(slot) === kind), 0);
      const [decodes, helds] = [count(KIND.DECODE), count(KIND.HELD)];
      const text = `${decodes} of ${plural(column.slots, "slot")} got a token in this step`
        + (helds ? `, ${helds} held` : "") + (column.queue ? `; ${plural(column.queue, "request")} waiting` : "");
      return { n: column.n, kind: "calm", weight: 0, slots: [], text };
    }

    // The caption to announce now, or null: a screen reader needs time to speak.
    announce(now) {
      if (!this.shown || now - this.announcedAt < QUIET) return null;
      this.announcedAt = now;
      return this.shown.text;
    }
  }

  Object.assign(EB, { captionsOf, summaryOf, clientOf, Narrator });
  if (typeof module === "object" && module.exports) module.exports = EB;
})(globalThis);
