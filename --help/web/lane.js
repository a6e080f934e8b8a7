// One run of a race: its slots as a picture, and its figures up to a moment. It must not know where the run comes from.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});

  const ROWS = 190; // height of all rows of slots
  const LOWEST = 12; // of a row that is made lower

  class Lane {
    constructor(parent, name, model, origin) {
      Object.assign(this, { name, model, origin, offset: 0 });
      const box = (this.box = EB.element("section", "panel lane"));
      const bar = box.appendChild(EB.element("div", "bar"));
      const title = bar.appendChild(EB.element("h2"));
      this.badge = title.appendChild(EB.element("span", "badge", model.last?.policy ?? "…"));
      this.title = title.appendChild(EB.element("span", "", name === model.last?.policy ? "" : name));
      this.figures = bar.appendChild(EB.element("div", "figures"));
      this.texts = {};
      for (const figure of ["answered", "tokens/s", "mean latency", "waiting", "batch fill", "wasted rows"]) {
        const part = this.figures.appendChild(EB.element("span"));
        this.texts[figure] = part.appendChild(EB.element("b", "", "–"));
        part.append(` ${figure}`);
        if (figure !== "mean latency") continue;
        this.latency = part;
        part.title = "of all requests that have arrived; those without an answer count with their age";
      }
      this.end = this.figures.appendChild(EB.element("span", "done"));
      const canvas = box.appendChild(EB.element("canvas"));
      canvas.setAttribute("role", "img");
      this.canvas = canvas;
      const waste = box.appendChild(EB.element("div", "waste"));
      waste.setAttribute("role", "img");
      parent.append(box);
      this.picture = new EB.Picture(canvas, { height: ROWS });
      this.waste = new EB.WasteBar(waste);
      box.setAttribute("aria-label", `${this.badge.textContent}: ${name}`);
    }

    // Make the picture as low as `height`, if its rows stay high enough to see.
    fit(height) {
      const rows = Math.floor(height - this.picture.around);
      this.picture.wanted = Math.min(ROWS, Math.max(rows, LOWEST * Math.max(1, this.model.slots)));
    }

    // Running totals up to each step, so that any moment can be shown immediately.
    prepare() {
      const { columns } = this.model;
      const steps = EB.STEPS.map(() => 0);
      let output = 0, finished = 0;
      this.sums = columns.map((column) => {
        output += column.output;
        finished += column.finished;
        column.steps.forEach((value, k) => (steps[k] += value));
        return { output, finished, steps: steps.slice() };
      });
      this.total = this.model.given?.size ?? this.model.requests.size; // a lane that was cut has not seen all that others have
      this.latency.hidden = latencyAt(this.model, Infinity) === null && !this.live; // a recording may lack arrival times
      this.seconds = columns.length ? this.model.last.end - this.origin : 0;
      EB.put(this.badge, this.model.last?.policy ?? "…");
    }

    draw(now, span) {
      const at = this.origin + now;
      const index = this.model.indexAt(at);
      const first = this.model.columns[0];
      if (!first || first.t > at) {
        this.picture.draw(this.model, { index: 0, time: this.scale(span), at: this.origin + span, origin: this.origin, upTo: 0 });
      } else {
        this.picture.draw(this.model, { index, time: this.scale(span), at: this.origin + span, origin: this.origin });
      }
      this.showFigures(index, now);
    }

    showWaste(waste) {
      const wasted = EB.wastedRows(waste);
      EB.put(this.texts["batch fill"], EB.percent(1 - waste.idle));
      EB.put(this.texts["wasted rows"], wasted === null ? "–" : EB.percent(wasted));
      this.waste.show(waste);
    }

    scale(span) {
      return (Math.max(200, this.canvas.clientWidth) - 52) / span;
    }

    showFigures(index, now) {
      const sum = this.sums[index];
      if (!sum) return;
      const at = this.origin + now;
      const ended = now >= this.seconds;
      EB.put(this.texts.answered, `${EB.count(sum.finished)} of ${EB.count(this.total)}`);
      EB.put(this.texts["tokens/s"], EB.figure(sum.output / Math.max(Math.min(now, this.seconds), 1e-6)));
      EB.put(this.texts["mean latency"], EB.seconds(latencyAt(this.model, at)));
      EB.put(this.texts.waiting, EB.count(ended ? 0 : this.model.columns[index].queue));
      const all = sum.steps.reduce((a, b) => a + b, 0) || 1;
      this.showWaste(Object.fromEntries(EB.STEPS.map((name, k) => [name, sum.steps[k] / all])));
      EB.put(this.end, !ended ? "" : this.cut ? "the recording ends here" : `✓ finished in ${EB.seconds(this.seconds)}`);
      const label = `${this.badge.textContent}: ${sum.finished} of ${this.total} answered after ${EB.seconds(Math.min(now, this.seconds))}`;
      if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    }
  }

  // The mean latency of all requests that have arrived by time `at`; null before the first. A request without an answer
  // counts with its age, because otherwise a lane whose requests all wait would look as fast as any.
  function latencyAt(model, at) {
    let sum = 0, arrived = 0;
    for (const request of model.requests.values()) {
      if (request.arrived === null || request.arrived > at) continue;
      sum += Math.min(request.left ?? Math.max(at, request.arrived), at) - request.arrived;
      arrived++;
    }
    return arrived ? sum / arrived : null;
  }

  // Count the slots that a server with fewer than the others lacks as idle.
  function levelLanes(lanes) {
    const slots = Math.max(...lanes.map((lane) => lane.model.slots));
    for (const { model } of lanes) {
      for (const column of model.columns) column.steps[EB.STEPS.indexOf("idle")] += slots - column.slots;
      model.slots = slots;
    }
  }

  Object.assign(EB, { Lane, latencyAt, levelLanes });
})(globalThis);
