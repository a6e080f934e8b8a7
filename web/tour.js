// The guided tour: it goes from stop to stop by itself, switches the server's policy and load for each, and shows what was
// measured. It stops going when the reader takes over, and leaving brings back what was there before. It does not draw
// the picture; `lit` names the requests to light up.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const PER_WORD = 0.3; // seconds, as 200 words a minute
  const LOOK = 5; // seconds for the figures and the picture
  const LEASE = 60; // seconds after which the server ends the load of a tour that was killed
  const TAKES_OVER = "button, a, input, select, summary, label, canvas, tr"; // what a reader clicks to do something else

  class Tour {
    // box: its section of the page; live: the model of this server; slots() of the engine; axis(name) sets what a column of
    // the picture shows, and returns what it showed.
    constructor({ box, opener, headers, live, slots, isShared, axis }) {
      Object.assign(this, { box, opener, headers, live, slots, isShared, axis });
      this.at = -1; // the stop, or -1 before the first
      this.before = null; // what leaving brings back
      this.other = false; // whether the stop shows what it is compared with
      this.results = new Map(); // figures by load and policy
      this.guesses = new Map(); // the choice of the reader by stop
      this.playing = false; // whether it goes on by itself
      this.spent = 0; // seconds that what is shown now has been shown
      this.hurry = 1; // how many times as fast as a reader it goes on
      this.turn = Promise.resolve(); // what was asked of the server last
      this.busy = 0;
      opener.addEventListener("click", () => (box.hidden ? this.invite() : this.leave()));
      document.addEventListener("click", (event) => event.target.closest(TAKES_OVER) && this.takeOver(event));
      document.addEventListener("keydown", (event) => ["Tab", "Shift", "Control", "Alt", "Meta"].includes(event.key) || this.takeOver(event));
      addEventListener("pagehide", () => {
        if (this.before) this.restore(true).catch(() => {}); // nobody is left to read an error
        this.close();
      });
    }

    get stop() {
      return EB.STOPS[this.at];
    }

    get lit() {
      return this.stop?.lit;
    }

    // What this stop shows now: itself, or what it is compared with.
    get scene() {
      return this.other ? this.stop.versus : this.stop;
    }

    get policy() {
      return this.scene.policy;
    }

    // The place of its figures.
    get key() {
      return `${this.stop.load.name} ${this.policy}`;
    }

    get isLast() {
      return this.at === EB.STOPS.length - 1;
    }

    // Offer the tour.
    invite() {
      const title = EB.element("h2", "", "A guided tour of batching");
      title.id = "tour-title";
      title.tabIndex = -1;
      const shared = this.isShared()
        ? " While it lasts, the policy and the load are the tour's, for everyone who uses this server; leaving brings back the policy." : "";
      this.text = EB.element("p", "lead", "See in one minute what held rows are and why dynamic batching wins; in three, also long "
        + "prompts, shared prefixes and fairness. The tour runs by itself: it switches this server's policy, sends requests, and "
        + `measures what it says. You can pause it at any time.${shared}`);
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

    // The stop that the page's address names, as in #tour-3; -1 is none.
    static get named() {
      return Number(/^#tour-([1-9])$/.exec(location.hash)?.[1] ?? 0) - 1;
    }

    async begin(at = 0) {
      await this.attempt(async () => {
        if (this.before) return; // the second of two clicks
        const known = await EB.readPolicies(this.headers);
        const { loop, order } = EB.partsOf(known.policy);
        if (!(loop in known.policies && order in known.orders)) {
          throw new Error(`The tour could not bring back ${known.policy}, which was named at the start. Start the server with one `
            + "of its own policies, such as ./server.sh dynamic, to take the tour.");
        }
        const reply = await fetch("load", { headers: this.headers({}) });
        const load = reply.ok ? await reply.json() : null;
        this.before = { policy: known.policy, options: known.options, load: load?.active && load.params?.users ? load.params : null,
          axis: this.axis() };
        this.results.clear();
        this.guesses.clear();
        this.build();
        document.body.classList.add("touring"); // the tour and the picture have the page for themselves
        this.pause.focus({ preventScroll: true });
        clearInterval(this.renewal);
        this.renewal = setInterval(() => this.renew(), (LEASE / 3) * 1000);
        await this.go(Math.min(at, EB.STOPS.length - 1));
        this.play(!matchMedia("(prefers-reduced-motion: reduce)").matches);
      });
    }

    // The panel of a stop; `go` fills it.
    build() {
      this.title = EB.element("h2");
      this.title.id = "tour-title";
      this.title.tabIndex = -1;
      this.place = EB.element("p", "sub");
      this.text = EB.element("p", "lead");
      this.more = this.button("more", () => this.unfold(!this.box.classList.contains("unfolded")));
      this.more.className = "plain more"; // shown where the text is cut to a few lines
      this.guess = EB.element("p", "guess");
      this.finding = EB.element("p", "finding");
      this.line = EB.element("p", "figures"); // instead of the table where that has no room
      const words = EB.element("div");
      const read = EB.element("div"); // read out at each stop; the finding changes too often for that
      read.setAttribute("aria-live", "polite");
      read.append(this.place, this.title, this.text);
      words.append(read, this.more, this.guess, this.finding, this.line);
      this.table = EB.element("table");
      const top = EB.element("div", "stop");
      this.bars = EB.STOPS.map((stop, k) => {
        const bar = this.button("", () => this.move(() => this.go(k)));
        bar.setAttribute("aria-label", `Stop ${k + 1}: ${stop.title}`);
        bar.title = stop.title;
        bar.append(EB.element("i"));
        return bar;
      });
      const line = EB.element("div", "stops");
      line.append(...this.bars);
      this.pause = this.button("Pause tour", () => this.play(!this.playing));
      this.back = this.button("Back", () => this.move(() => this.go(this.at - 1)));
      this.next = this.button("Next", () => (this.isLast ? this.leave() : this.move(() => this.go(this.at + 1))), true);
      this.compare = this.button("", () => this.move(() => this.show(!this.other)));
      this.buttons.replaceChildren(this.compare, this.pause, this.back, this.next, this.button("Leave", () => this.leave()));
      top.append(words, this.table, this.buttons);
      this.box.replaceChildren(line, top, this.problem);
    }

    async go(at) {
      this.at = at;
      const { stop, isLast } = this;
      EB.put(this.place, `Stop ${at + 1} of ${EB.STOPS.length}`);
      EB.put(this.title, stop.title);
      EB.put(this.next, isLast ? "Finish" : "Next");
      this.back.disabled = at === 0;
      this.back.title = at ? "" : "this is the first stop";
      this.unfold(false);
      this.offerGuess();
      history.replaceState(null, "", `#tour-${at + 1}`);
      this.axis(stop.axis ?? "steps");
      this.bars.forEach((bar, k) => (k === at ? bar.setAttribute("aria-current", "step") : bar.removeAttribute("aria-current")));
      await this.show(false);
    }

    unfold(is) {
      this.box.classList.toggle("unfolded", is);
      EB.put(this.more, is ? "less" : "more");
    }

    // Let the reader say what will be measured.
    offerGuess() {
      const { ask, choices } = this.stop.guess;
      const buttons = choices.map((choice, k) => {
        const button = this.button(choice, () => {
          this.guesses.set(this.at, k);
          buttons.forEach((other, j) => other.setAttribute("aria-pressed", String(j === k)));
          this.refresh();
        });
        button.setAttribute("aria-pressed", String(this.guesses.get(this.at) === k));
        return button;
      });
      this.guess.replaceChildren(EB.element("span", "", `Your guess: ${ask}`), ...buttons);
    }

    // Whether the guess was right, as a word before what was measured.
    judge(figures, of) {
      const said = this.guesses.get(this.at), right = this.stop.guess.right(figures, of);
      if (said === undefined || right === undefined) return "";
      return said === right ? "Right. " : `Not so: ${this.stop.guess.choices[right]}. `;
    }

    // Switch to the stop's policy, or to the one that it is compared with, and to its load.
    async show(other) {
      const { stop } = this;
      this.other = other;
      this.spent = 0;
      EB.put(this.text, this.scene.text);
      EB.put(this.finding, "");
      EB.put(this.line, "");
      this.compare.hidden = !stop.versus;
      EB.put(this.compare, (other ? stop.versus?.undo : stop.versus?.label) ?? "");
      this.showProgress();
      await EB.switchPolicy(this.headers, this.policy, this.scene.options?.(this.slots()));
      const load = JSON.stringify({ ...stop.load(this.slots()), lease: LEASE, replace: true });
      if (load !== this.load) await this.send(load);
      this.from = (this.live.last?.n ?? 0) + 1;
      this.refresh();
    }

    // Keep the load of the tour alive. Leave if the server has ended it, as while a computer sleeps.
    async renew() {
      const reply = await fetch("load", { headers: this.headers({}) }).catch(() => null);
      const load = reply?.ok ? await reply.json() : null;
      if (load && this.before && !this.busy && !(load.active && load.params.lease)) this.leave();
    }

    async send(load, more = {}) {
      const headers = this.headers({ "Content-Type": "application/json" });
      const reply = await fetch("load", { method: "POST", headers, body: load, ...more });
      if (!reply.ok) throw await EB.refusal(reply);
      this.load = load;
    }

    // Go on by itself, or wait for the reader; after the end it begins again.
    play(on) {
      this.playing = on;
      EB.put(this.pause, on ? "Pause tour" : "Play tour");
      if (on && this.isLast && this.other && this.share === 1) this.attempt(() => this.go(0));
    }

    // The reader chose a stop, and so goes on alone.
    move(act) {
      this.play(false);
      this.attempt(act);
    }

    // The reader does something else on the page, or presses Escape in the tour.
    takeOver(event) {
      if (this.playing && (!this.box.contains(event.target) || event.key === "Escape")) this.play(false);
    }

    // The part that is over of the time that what is shown takes to read.
    get share() {
      const words = this.scene.text.split(" ").length;
      return Math.min(1, (this.spent * this.hurry) / (LOOK + PER_WORD * words));
    }

    // Advance the clock. Go to the next stop once the text has been read and the stop has its figures.
    pass(seconds) {
      if (!this.playing || this.busy || !this.stop) return;
      this.spent += seconds;
      this.showProgress();
      if (this.share < 1 || !this.results.has(this.key)) return;
      if (this.stop.versus && !this.other) this.attempt(() => this.show(true));
      else if (this.isLast) this.play(false);
      else this.attempt(() => this.go(this.at + 1));
    }

    showProgress() {
      const here = this.stop.versus ? (this.share + this.other) / 2 : this.share;
      this.bars.forEach((bar, k) => {
        bar.firstChild.style.transform = `scaleX(${k < this.at ? 1 : k > this.at ? 0 : here.toFixed(3)})`;
      });
    }

    // Show the figures of this stop, and beside them those that were measured with the same load before.
    refresh() {
      const { stop } = this;
      if (!stop || this.box.hidden) return;
      const { policy, key } = this;
      const figures = EB.measure(this.live, this.from, policy);
      if (figures) {
        this.results.set(key, figures);
        const of = (other) => this.results.get(`${stop.load.name} ${other}`);
        EB.put(this.finding, this.judge(figures, of) + stop.finding(figures, of));
        EB.put(this.line, stop.figures.map(([title, show]) => `${title} ${show(figures)}`).join(" · "));
      }
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

    // Do something that the server may refuse, after what was asked of it before, and say so here.
    attempt(act) {
      this.busy++;
      this.turn = this.turn.then(async () => {
        EB.put(this.problem, "");
        try {
          await act();
        } catch (error) {
          EB.put(this.problem, error.message);
          if (this.stop) this.play(false);
        }
        this.busy--;
      });
      return this.turn;
    }

    async leave() {
      if (this.before) {
        await this.attempt(() => this.restore());
        if (this.problem.textContent) return;
      }
      this.close();
      this.opener.focus();
    }

    close() {
      if (this.before) {
        this.axis(this.before.axis);
        history.replaceState(null, "", location.pathname + location.search);
      }
      clearInterval(this.renewal);
      this.before = null;
      this.at = -1;
      this.playing = false;
      this.load = null;
      this.shape = null;
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

  Object.assign(EB, { Tour });
})(globalThis);
