// The guided tour: six stops, each of which switches the server's policy and load and measures what its paragraph
// claims. Leaving brings back what was there before. It does not draw the picture; `lit` names the requests to light up.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const SPAN = 10; // seconds that are measured
  const LEAST = 2; // seconds before a figure is shown

  const seconds = (value) => EB.seconds(value);
  const percent = (share) => (share === null ? "–" : EB.percent(share));
  const PACE = [["tokens/s", (m) => EB.figure(m.tokensPerSecond)], ["slots taken", (m) => percent(m.fill)],
    ["rows held", (m) => percent(m.held)]];
  const STEPS = [["usual step", (m) => seconds(m.step)], ["step with a long prompt", (m) => seconds(m.promptStep)],
    ["steps for the prompt", (m) => (m.chunks ? String(m.chunks) : "–")]];
  const HITS = [["cache hits", (m) => `${m.hits} of ${m.joined}`], ["tokens saved", (m) => EB.count(m.cached)],
    ["first token, hit", (m) => seconds(m.firstHit)], ["first token, no hit", (m) => seconds(m.firstMiss)]];
  const WAITS = [["quiet waits", (m) => seconds(m.waits.quiet)], ["loud waits", (m) => seconds(m.waits.loud)]];

  // load(slots) is the body of POST /load, options(slots) those of the policy; `versus` is what a stop can be
  // compared with: the button says `label`, and while it is shown `undo`.
  const STOPS = [
    {
      title: "One at a time", policy: "nobatch", load: plain, figures: PACE,
      text: "The server computes one request from its prompt to its last token, and only then takes the next. One slot "
        + "works and the others stay empty, while everyone else waits in line. The next two stops get the same requests: "
        + "watch the tokens per second.",
    },
    {
      title: "Static batching and its held rows", policy: "static", load: plain, figures: PACE,
      text: "Requests now start together, as many as there are slots. A batch runs until its longest answer is finished, and "
        + "nobody joins meanwhile. A request that is done early keeps its slot: the hatched rows are computed, but give no "
        + "token, and those in line wait for the whole batch.",
    },
    {
      title: "Dynamic batching", policy: "dynamic", load: plain, figures: PACE,
      text: "Requests join and leave between any two steps. As soon as one is done, its slot goes to the next in line, so no "
        + "row is held, and the batch stays full while anyone waits. These are the same requests on the same server; only "
        + "who joins and leaves has changed.",
    },
    {
      title: "Long prompts, in chunks", policy: "chunked", options: chunks, load: long, figures: STEPS,
      versus: {
        label: "Without chunks", undo: "With chunks", policy: "dynamic",
        text: "Without chunks, a prompt is read in one step, as far as --max-tokens-per-step allows. While a long one is read, the step takes several times as long, "
          + "and every other request waits that long for its next token. In the picture the prompt has few dark cells; with "
          + "columns that are slices of time, they are wide.",
      },
      text: "Before its first token, a request must read its prompt. If a long prompt is read in one step, that step is long, "
        + "and every other request waits for its next token. In chunks, a step computes only a few dozen prompt tokens: the dark "
        + "cells of one prompt stretch over several short steps, and the others get a token in each of them.",
    },
    {
      title: "Shared prefixes", policy: "chunked", options: chunks, load: shared, figures: HITS,
      text: "Three of four prompts begin with the same long text, as instructions to a chat bot would. Its keys and values are "
        + "computed once and kept. A request that begins the same takes them from the cache (◇), skips that part of its "
        + "prompt, and writes its first token sooner. One in four has a beginning of its own, and reads all of it: the long dark blocks.",
    },
    {
      title: "Fairness", policy: "dynamic+vtc", load: twoClients, figures: WAITS,
      versus: {
        label: "First come, first served", undo: "Back to vtc", policy: "dynamic",
        text: "First come, first served: the same two clients, but the quiet one, lit up in the picture, stands behind all of the "
          + "loud one's line, and waits as long as the loud one does.",
      },
      lit: (request) => EB.clientOf(request) === "quiet",
      text: "Two clients share the server: a loud one with a long line of requests, and a quiet one that asks now and then. "
        + "First come, first served puts the quiet one behind all of the loud one's line. Here the client that was served "
        + "less goes first (vtc), so the quiet one, lit up in the picture, hardly waits.",
    },
  ];

  // A token for each slot, and 56 for prompts.
  function chunks(slots) {
    return { max_batched_tokens: slots + 56 };
  }

  function plain(slots) {
    return { users: capped(2 * slots), pause: 0.4, min_tokens: 8, max_tokens: 48, seed: 1 };
  }

  function long(slots) {
    return { users: capped(1.5 * slots), pause: 0.4, min_tokens: 16, max_tokens: 64, seed: 2, prompts: "long" };
  }

  function shared(slots) {
    return { users: capped(1.5 * slots), pause: 0.4, min_tokens: 16, max_tokens: 48, seed: 3, prompts: "shared" };
  }

  function twoClients(slots) {
    return { users: capped(4 * slots), quiet_users: 2, pause: 0.4, min_tokens: 8, max_tokens: 48, seed: 4 };
  }

  function capped(users) {
    return Math.min(256, Math.ceil(users));
  }

  // The figures of the last seconds under a policy since step `from`; null before there are enough.
  function measure(model, from, policy) {
    const { columns } = model;
    const since = columns.findLastIndex((column) => column.n < from || column.policy !== policy || !isOf(model, column, from)) + 1;
    const last = columns[columns.length - 1];
    if (!last || since >= columns.length || last.end - columns[since].t < LEAST) return null;
    let first = columns.length - 1;
    while (first > since && columns[first - 1].t > last.end - SPAN) first--;
    const recent = columns.slice(first);
    const { steps } = model.count(first, columns.length);
    const all = Object.values(steps).reduce((a, b) => a + b, 0);
    const most = Math.max(...recent.map((column) => column.tokens));
    const times = (columns) => columns.map((column) => column.seconds);
    const came = [...model.requests.values()].filter((r) => r.arrived !== null && r.arrived >= columns[since].t && r.joinedAt >= from);
    const median = (values) => EB.percentile(values.filter((value) => value !== null), 50);
    const first_ = (r) => (r.first === null ? null : r.first - r.joined);
    const waits = (client) => median(came.filter((r) => EB.clientOf(r) === client).map((r) => r.joined - r.arrived));
    return {
      span: last.end - columns[since].t,
      tokensPerSecond: recent.reduce((sum, column) => sum + column.output, 0) / (last.end - recent[0].t),
      fill: all ? 1 - steps.idle / all : null,
      held: all > steps.idle ? steps.held / (all - steps.idle) : null,
      step: median(times(recent)), promptStep: median(times(recent.filter((column) => column.tokens > most / 2))),
      chunks: mostChunks(model, since),
      joined: came.length, hits: came.filter((r) => r.hit > 0).length, cached: came.reduce((sum, r) => sum + r.hit, 0),
      firstHit: median(came.filter((r) => r.hit > 0).map(first_)), firstMiss: median(came.filter((r) => !r.hit).map(first_)),
      waits: { quiet: waits("quiet"), loud: waits("loud") },
    };
  }

  // Whether all members of a step have joined since step `from`: what ran at a switch runs on under the new policy.
  function isOf(model, column, from) {
    return column.who.every((number) => !number || (model.requests.get(number)?.joinedAt ?? 0) >= from);
  }

  // In how many steps the prompt of a request was computed, at most.
  function mostChunks(model, since) {
    const counts = new Map();
    for (const column of model.columns.slice(since)) {
      for (let slot = 0; slot < column.slots; slot++) {
        if (column.kind(slot) === EB.KIND.PREFILL) counts.set(column.who[slot], (counts.get(column.who[slot]) ?? 0) + 1);
      }
    }
    return Math.max(0, ...counts.values());
  }

  class Tour {
    // box: its section of the page; live: the model of this server; slots() of the engine.
    constructor({ box, opener, headers, live, slots, isShared }) {
      Object.assign(this, { box, opener, headers, live, slots, isShared });
      this.at = -1; // the stop, or -1 before the first
      this.before = null; // what leaving brings back
      this.other = false; // whether the stop shows what it is compared with
      this.results = new Map(); // figures by load and policy
      opener.addEventListener("click", () => (box.hidden ? this.invite() : this.leave()));
      addEventListener("pagehide", () => {
        if (this.before) this.restore(true).catch(() => {}); // nobody is left to read an error
        this.close();
      });
    }

    get stop() {
      return STOPS[this.at];
    }

    get lit() {
      return this.stop?.lit;
    }

    // The policy that this stop shows now.
    get policy() {
      return this.other ? this.stop.versus.policy : this.stop.policy;
    }

    // The place of its figures.
    get key() {
      return `${this.stop.load.name} ${this.policy}`;
    }

    // Offer the tour.
    invite() {
      const title = EB.element("h2", "", "A guided tour of batching");
      title.id = "tour-title";
      title.tabIndex = -1;
      const shared = this.isShared()
        ? " While it lasts, the policy and the load are the tour's, for everyone who uses this server; leaving brings back the policy." : "";
      this.text = EB.element("p", "lead", "Six stops, a minute each: one at a time, static, dynamic, long prompts, shared "
        + `prefixes, fairness. The tour switches this server's policy and sends it requests.${shared}`);
      this.problem = EB.element("p", "problem");
      this.problem.setAttribute("role", "alert");
      this.buttons = EB.element("div", "buttons");
      this.buttons.append(this.button("Start the tour", () => this.begin(), true), this.button("Not now", () => this.leave()));
      this.box.replaceChildren(title, this.text, this.problem, this.buttons);
      this.box.hidden = false;
      this.opener.setAttribute("aria-expanded", "true");
    }

    button(text, act, isPrimary = false) {
      const button = EB.element("button", isPrimary ? "primary" : "", text);
      button.type = "button";
      button.addEventListener("click", act);
      return button;
    }

    async begin() {
      await this.attempt(async () => {
        const known = await EB.readPolicies(this.headers);
        const { loop, order } = EB.partsOf(known.policy);
        if (!(loop in known.policies && order in known.orders)) {
          throw new Error(`The tour could not bring back ${known.policy}, which was named at the start. Start the server with one `
            + "of its own policies, such as ./server.sh dynamic, to take the tour.");
        }
        const reply = await fetch("load", { headers: this.headers({}) });
        const load = reply.ok ? await reply.json() : null;
        this.before = { policy: known.policy, options: known.options, load: load?.active && load.params?.users ? load.params : null };
        this.results.clear();
        this.build();
        document.body.classList.add("touring"); // the tour and the picture have the page for themselves
        await this.go(0);
      });
    }

    // The panel of a stop; `go` fills it.
    build() {
      this.title = EB.element("h2");
      this.title.id = "tour-title";
      this.title.tabIndex = -1;
      this.place = EB.element("p", "sub");
      this.text = EB.element("p", "lead");
      const words = EB.element("div");
      words.setAttribute("aria-live", "polite");
      words.append(this.place, this.title, this.text);
      this.table = EB.element("table");
      const top = EB.element("div", "stop");
      this.back = this.button("Back", () => this.attempt(() => this.go(this.at - 1)));
      this.next = this.button("", () => (this.at === STOPS.length - 1 ? this.leave() : this.attempt(() => this.go(this.at + 1))), true);
      this.compare = this.button("", () => this.attempt(() => this.show(!this.other)));
      this.buttons.replaceChildren(this.compare, this.back, this.next, this.button("Leave", () => this.leave()));
      top.append(words, this.table, this.buttons);
      this.box.replaceChildren(top, this.problem);
    }

    async go(at) {
      this.at = at;
      const { stop } = this;
      EB.put(this.place, `Stop ${at + 1} of ${STOPS.length}`);
      EB.put(this.title, stop.title);
      EB.put(this.next, at === STOPS.length - 1 ? "Finish" : "Next");
      this.back.disabled = at === 0;
      await this.show(false);
    }

    // Switch to the stop's policy, or to the one that it is compared with, and to its load.
    async show(other) {
      const { stop } = this;
      this.other = other;
      EB.put(this.text, (other ? stop.versus : stop).text);
      this.compare.hidden = !stop.versus;
      EB.put(this.compare, (other ? stop.versus?.undo : stop.versus?.label) ?? "");
      await EB.switchPolicy(this.headers, this.policy, (other ? stop.versus : stop).options?.(this.slots()));
      const load = JSON.stringify({ ...stop.load(this.slots()), replace: true });
      if (load !== this.load) await this.send(load);
      this.from = (this.live.last?.n ?? 0) + 1;
      this.refresh();
    }

    async send(load, more = {}) {
      const headers = this.headers({ "Content-Type": "application/json" });
      const reply = await fetch("load", { method: "POST", headers, body: load, ...more });
      if (!reply.ok) throw await EB.refusal(reply);
      this.load = load;
    }

    // Show the figures of this stop, and beside them those that were measured with the same load before.
    refresh() {
      const { stop } = this;
      if (!stop || this.box.hidden) return;
      const { policy, key } = this;
      const figures = measure(this.live, this.from, policy);
      if (figures) this.results.set(key, figures);
      const rows = [...this.results].filter(([other]) => other.startsWith(`${stop.load.name} `))
        .map(([other, value]) => [other.split(" ")[1], value]);
      if (!figures && !rows.some(([name]) => name === policy)) rows.push([policy, null]);
      const head = ["", ...stop.figures.map(([title]) => title)];
      const body = rows.map(([name, value]) => [name, ...stop.figures.map(([, show], k) => (value ? show(value) : k ? "" : "measuring…"))]);
      this.fill(head, body, policy);
    }

    fill(head, body, policy) {
      const shape = JSON.stringify([head, body.map(([name]) => name)]);
      if (shape !== this.shape) {
        this.shape = shape;
        const line = (cells, tag) => {
          const row = EB.element("tr");
          cells.forEach((text, k) => {
            const cell = row.appendChild(EB.element(k ? tag : "th", "", text));
            if (cell.tagName === "TH") cell.scope = tag === "th" ? "col" : "row";
          });
          return row;
        };
        this.table.replaceChildren(line(head, "th"), ...body.map((cells) => line(cells, "td")));
      }
      body.forEach((cells, r) => {
        const row = this.table.rows[r + 1];
        row.classList.toggle("chosen", cells[0] === policy);
        cells.forEach((text, k) => EB.put(row.cells[k], text));
      });
    }

    // Do something that the server may refuse, and say so here.
    async attempt(act) {
      const buttons = [...this.box.querySelectorAll("button")].filter((button) => !button.disabled);
      for (const button of buttons) button.disabled = true;
      EB.put(this.problem, "");
      try {
        await act();
      } catch (error) {
        EB.put(this.problem, error.message);
      } finally {
        const { activeElement } = document;
        for (const button of buttons) button.disabled = button === this.back && this.at === 0;
        if (activeElement === document.body) this.next?.focus();
      }
    }

    async leave() {
      if (this.before) await this.attempt(() => this.restore());
      if (this.problem.textContent) return;
      this.close();
      this.opener.focus();
    }

    close() {
      this.before = null;
      this.at = -1;
      this.load = null;
      this.box.hidden = true;
      document.body.classList.remove("touring");
      this.opener.setAttribute("aria-expanded", "false");
    }

    // Bring back policy and load; with `keepalive` the requests outlive the page.
    async restore(keepalive = false) {
      const { policy, options, load } = this.before;
      const more = { keepalive };
      const switched = EB.switchPolicy(this.headers, policy, options, more);
      const sent = load ? this.send(JSON.stringify({ ...load, replace: true }), more)
        : fetch("load", { method: "DELETE", headers: this.headers({}), ...more });
      await Promise.all([switched, sent]);
    }
  }

  Object.assign(EB, { Tour, STOPS, measure });
})(globalThis);
