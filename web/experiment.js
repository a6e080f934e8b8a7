// A running experiment of ./eb switch: its windows on a time axis, each in the color of the policy that served, and at the end
// the receipt as the command wrote it. The page computes nothing, and shows only the windows that it has seen itself.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const MOST = 600; // windows

  class Experiment {
    constructor(box) {
      this.box = box;
      this.windows = []; // { policy, since, until }; the last has no `until` while it goes on
      this.bar = EB.element("div", "windows");
      this.bar.setAttribute("role", "img");
      const axis = EB.element("p", "sub axis");
      [this.from, this.said, this.to] = [0, 1, 2].map(() => axis.appendChild(EB.element("span")));
      this.names = EB.element("ul", "legend");
      this.found = EB.element("div");
      this.found.setAttribute("role", "status");
      box.append(EB.element("h2", "", "Experiment"), this.bar, axis, this.names, this.found);
    }

    // A policy begins to serve: leased for a window, or for good.
    switched({ policy, leased, now }) {
      const last = this.windows.at(-1), goes = last && last.until === undefined;
      if (goes) last.until = now;
      if (leased) {
        if (!goes) this.reset();
        this.windows.push({ policy, since: now });
        if (this.windows.length > MOST) this.windows.shift();
      } else if (goes && !this.found.childElementCount) {
        EB.put(this.found, "The lease ended without a receipt.");
      }
      this.draw(now);
    }

    // Forget an experiment before, or of another run of the server.
    reset() {
      this.windows = [];
      this.found.replaceChildren();
      this.box.hidden = true;
    }

    // Show the windows until `now` on the loop's clock.
    draw(now) {
      if (!this.windows.length) return;
      this.box.hidden = false;
      const last = this.windows.at(-1), begin = this.windows[0].since, end = last.until ?? now;
      const names = [...new Set(this.windows.map(({ policy }) => policy))].sort();
      const color = (policy) => EB.PALETTE[names.indexOf(policy) % EB.PALETTE.length];
      this.bar.replaceChildren(...this.windows.map(({ policy, since, until }) => {
        const part = EB.element("i");
        part.title = `${policy}, ${EB.seconds((until ?? end) - since)}`;
        Object.assign(part.style, { flexGrow: String((until ?? end) - since), background: color(policy) });
        return part;
      }));
      const length = EB.seconds(end - begin);
      EB.put(this.from, "0 s");
      EB.put(this.said, `${this.windows.length} windows seen`);
      EB.put(this.to, length);
      this.bar.setAttribute("aria-label", `${this.windows.length} windows in ${length}, in turns of ${names.join(" and ")}`);
      this.names.replaceChildren(...names.map((policy) => {
        const name = EB.element("li"), key = name.appendChild(EB.element("span", "key"));
        key.style.background = color(policy);
        name.append(policy + (last.until === undefined && last.policy === policy ? " serves now" : ""));
        return name;
      }));
    }

    // Show the lines of a receipt: a table whose first row is its head, and around it lines of a single text.
    receipt({ lines }) {
      const table = EB.element("table"), rows = lines.filter((cells) => cells.length > 1);
      for (const [k, cells] of rows.entries()) {
        const row = (k ? table.tBodies[0] ?? table.createTBody() : table.createTHead()).insertRow();
        for (const [place, cell] of cells.entries()) row.append(EB.element(k && place ? "td" : "th", "", cell));
      }
      const scroll = EB.element("div", "scroll");
      scroll.tabIndex = 0;
      scroll.append(table);
      const texts = lines.filter((cells) => cells.length === 1).map(([text]) => EB.element("p", "sub", text));
      const verdict = texts.pop();
      if (verdict) verdict.className = "verdict";
      this.found.replaceChildren(...[verdict, ...texts, rows.length > 1 && scroll].filter(Boolean));
      this.box.hidden = false;
    }
  }

  Object.assign(EB, { Experiment });
})(globalThis);
