// Two charts of the last minute: tokens per second with the requests running and waiting, and percentiles of the times to the
// first token and between tokens.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const MINUTE = 60;
  const HEIGHT = 120;
  const SPAN = 10; // seconds before a moment from which its percentiles are taken, as in the tiles

  const ink = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const line = (label, scale, name, more) => ({ label, scale, stroke: ink(name), width: 1.5, points: { show: false }, ...more });
  const upTo = (least) => ({ range: (u, low, high) => [0, Math.max(least, (high ?? 0) * 1.1)] });
  const times = (u, ticks) => ticks.map((tick) => EB.seconds(tick).replace(".00", ""));

  // A plot over the last minute in a box, with one scale on each side.
  class MinutePlot {
    constructor(box, { left, right, values, series }) {
      this.box = box;
      const side = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 0.5 }, ticks: { show: false }, font: "10px system-ui",
        size: 44, values: values ?? ((u, ticks) => ticks.map((tick) => EB.count(tick))) };
      this.plot = new uPlot({
        width: 300, height: HEIGHT, legend: { show: false }, cursor: { show: false }, padding: [6, 2, 0, 0],
        scales: { x: { time: false }, [left[0]]: upTo(left[1]), [right[0]]: upTo(right[1]) },
        axes: [
          { ...side, size: 18, values: (u, ticks) => ticks.map((t) => (t ? `${t} s` : "now")) },
          { ...side, scale: left[0] },
          { ...side, scale: right[0], side: 1, grid: { show: false } },
        ],
        series: [{}, ...series],
      }, [[-MINUTE, 0], ...series.map(() => [0, 0])], box);
    }

    show(columns) {
      const width = this.box.clientWidth;
      if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData([Array.from({ length: MINUTE + 1 }, (_, k) => k - MINUTE), ...columns]);
    }
  }

  class MinuteChart {
    constructor(rates, latency) {
      const stepped = uPlot.paths.stepped({ align: 1 });
      this.rates = new MinutePlot(rates, {
        left: ["tokens", 10], right: ["requests", 4],
        series: [line("tokens/s", "tokens", "--accent", { fill: () => `${ink("--accent")()}33` }),
          line("running", "requests", "--good", { paths: stepped }),
          line("waiting", "requests", "--held", { dash: [4, 3], paths: stepped })],
      });
      this.latency = new MinutePlot(latency, {
        left: ["ttft", 0.01], right: ["itl", 0.01], values: times,
        series: [line("TTFT p50", "ttft", "--accent"), line("TTFT p99", "ttft", "--accent", { dash: [4, 3] }),
          line("ITL p50", "itl", "--held"), line("ITL p99", "itl", "--held", { dash: [4, 3] })],
      });
    }

    redraw() {
      for (const { plot } of [this.rates, this.latency]) plot.redraw();
    }

    // Show the minute before the step at `index`, or live before `at`.
    draw(model, index, at) {
      const end = at ?? model.columns[index]?.end ?? 0;
      const [tokens, running, waiting] = [0, 1, 2].map(() => new Array(MINUTE + 1).fill(0));
      const [firsts, gaps] = [0, 1].map(() => Array.from({ length: MINUTE + SPAN + 1 }, () => [])); // by second
      for (let i = index; i >= 0; i--) {
        const column = model.columns[i];
        const place = MINUTE - Math.max(0, Math.floor(end - column.end));
        if (place < -SPAN) break;
        firsts[place + SPAN].push(...column.firsts);
        gaps[place + SPAN].push(...column.gaps);
        if (place < 0) continue;
        tokens[place] += column.output;
        running[place] = Math.max(running[place], model.running(column));
        waiting[place] = Math.max(waiting[place], column.queue);
      }
      tokens[MINUTE] = tokens[MINUTE - 1]; // the current second is incomplete
      this.rates.show([tokens, running, waiting]);
      this.latency.show([firsts, gaps].flatMap((values) => [50, 99].map((q) =>
        tokens.map((_, k) => EB.percentile(values.slice(k, k + SPAN + 1).flat(), q)))));
    }
  }

  Object.assign(EB, { MinuteChart });
})(globalThis);
