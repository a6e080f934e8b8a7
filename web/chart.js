// The chart of the last minute: tokens per second, and requests running and waiting.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const MINUTE = 60;
  const HEIGHT = 120;

  class MinuteChart {
    constructor(box) {
      this.box = box;
      const ink = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
      const line = (label, scale, name, more) => ({ label, scale, stroke: ink(name), width: 1.5, points: { show: false }, ...more });
      const stepped = uPlot.paths.stepped({ align: 1 });
      const side = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 0.5 }, ticks: { show: false }, font: "10px system-ui",
        size: 38, values: (u, ticks) => ticks.map((tick) => EB.count(tick)) };
      const upTo = (least) => ({ range: (u, low, high) => [0, Math.max(least, high * 1.1)] });
      this.plot = new uPlot({
        width: 300, height: HEIGHT, legend: { show: false }, cursor: { show: false }, padding: [6, 2, 0, 0],
        scales: { x: { time: false }, tokens: upTo(10), requests: upTo(4) },
        axes: [
          { ...side, size: 18, values: (u, ticks) => ticks.map((t) => (t ? `${t} s` : "now")) },
          { ...side, scale: "tokens" },
          { ...side, scale: "requests", side: 1, grid: { show: false } },
        ],
        series: [{}, line("tokens/s", "tokens", "--accent", { fill: () => `${ink("--accent")()}33` }),
          line("running", "requests", "--good", { paths: stepped }),
          line("waiting", "requests", "--held", { dash: [4, 3], paths: stepped })],
      }, [[-MINUTE, 0], [0, 0], [0, 0], [0, 0]], box);
    }

    redraw() {
      this.plot.redraw();
    }

    // Show the minute before the step at `index`, or live before `at`.
    draw(model, index, at) {
      const width = this.box.clientWidth;
      if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
      const end = at ?? model.columns[index]?.end ?? 0;
      const seconds = Array.from({ length: MINUTE + 1 }, (_, k) => k - MINUTE);
      const [tokens, running, waiting] = [0, 1, 2].map(() => new Array(MINUTE + 1).fill(0));
      for (let i = index; i >= 0; i--) {
        const column = model.columns[i];
        const place = MINUTE - Math.max(0, Math.floor(end - column.end));
        if (place < 0) break;
        tokens[place] += column.output;
        running[place] = Math.max(running[place], model.running(column));
        waiting[place] = Math.max(waiting[place], column.queue);
      }
      tokens[MINUTE] = tokens[MINUTE - 1]; // the current second is incomplete
      this.plot.setData([seconds, tokens, running, waiting]);
    }
  }

  Object.assign(EB, { MinuteChart });
})(globalThis);
