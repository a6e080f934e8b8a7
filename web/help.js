// The help behind the question mark: a drawn example of a static batch, and the words that the page uses.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { element } = EB;
  const $ = (id) => document.getElementById(id);
  const LEFT = 74, TOP = 40, STEP = 46, ROW = 30, STEPS = 12;
  // Slot, first and last step, kind, and the request's color. #4 arrives in the middle of step 3.
  const RUNS = [
    [0, 1, 1, "prefill", 0], [0, 2, 4, "decode", 0], [0, 5, 8, "held", 0], [0, 9, 9, "prefill", 3], [0, 10, 12, "decode", 3],
    [1, 1, 1, "prefill", 1], [1, 2, 8, "decode", 1],
    [2, 1, 1, "prefill", 2], [2, 2, 6, "decode", 2], [2, 7, 8, "held", 2],
  ];
  const NAMES = { prefill: "small on", decode: "small", held: "small clear" }; // classes of a kind's name
  const TERMS = [
    ["slot", "A place in the batch, a row of the picture. A request has one from joining to leaving."],
    ["step", "One pass through the model for all requests in the batch, also called an iteration: a column of the picture."],
    ["prefill", "The steps that compute a request's prompt. The last of them gives its first token."],
    ["decode", "The steps after prefill. Each gives one more token."],
    ["held", "The request is finished, but a static batch keeps its slot until the longest request is finished too."],
    ["padding", "Where a batch computes rows of one length, what a shorter request's row is filled up with."],
    ["recomputed", "Tokens of a request that lost its pages to others (it was preempted), and had to be computed again."],
    ["rejected", "Draft tokens that were not accepted (--speculate). Accepted ones are useful: the request gets them a step earlier."],
    ["batch fill", "The share of the slots in which a step computes a row, wasted or not."],
    ["wasted rows", "The share of those rows that gave nothing: padding, held, recomputed and rejected."],
    ["KV page", "Memory for the keys and values of a fixed number of a request's tokens. A request takes more pages as it grows."],
    ["TTFT", "Time to first token: from the arrival to the first token. Waiting in the queue is part of it."],
    ["ITL", "Inter-token latency: the time between two tokens of a request."],
    ["TPOT", "Time per output token: a request's mean time between tokens, from its first token to its last."],
  ];

  function drawing() {
    const svg = shape("svg", { viewBox: "0 0 680 286", role: "img", "aria-label":
      "Example: three requests run in a static batch. Number 1 needs 4 steps, number 2 needs 8 and number 3 needs 6. Numbers 1 and 3 are "
      + "held until step 8. Number 4 arrives in step 3, waits until step 8, and has its first token after step 9." });
    svg.append(patterns());
    const x = (steps) => LEFT + steps * STEP; // the end of a step; 0 is the start of the first
    const text = (at, y, words, name = "") => {
      const node = shape("text", { x: at, y, class: name });
      node.textContent = words;
      svg.append(node);
    };
    text(x(6), 14, "steps", "middle soft");
    for (let step = 1; step <= STEPS; step++) text(x(step - 0.5), TOP - 8, String(step), "middle soft");
    for (let slot = 0; slot < 3; slot++) {
      text(LEFT - 8, TOP + slot * ROW + 19, `slot ${slot}`, "end soft");
      svg.append(shape("rect", { x: LEFT, y: TOP + slot * ROW + 1, width: STEPS * STEP, height: ROW - 3, class: "track" }));
    }
    for (const [slot, from, to, kind, hue] of RUNS) {
      const inset = kind === "decode" ? 4 : 0;
      const y = TOP + slot * ROW + 1 + inset;
      const pattern = kind === "held" ? { fill: `url(#held${hue})` } : {};
      svg.append(shape("rect", { x: x(from - 1) + 1, y, width: (to - from + 1) * STEP - 2, height: ROW - 3 - 2 * inset,
        class: `hue${hue} ${kind}`, ...pattern }));
      const words = kind === "decode" ? `#${hue + 1} decode` : kind;
      if (slot === 0 || kind === "decode") text(x(from - 1) + 6, TOP + slot * ROW + 18, words, NAMES[kind]);
    }
    text(x(10.5), TOP + 2 * ROW + 18, "idle", "middle soft");
    for (let step = 1; step < STEPS; step++) {
      svg.append(shape("rect", { x: x(step) - 0.5, y: TOP, width: 1, height: 3 * ROW, class: "paper" }));
    }
    const queue = TOP + 3 * ROW + 10;
    text(LEFT - 8, queue + 12, "queue", "end soft");
    svg.append(shape("rect", { x: x(2.5), y: queue, width: 5.5 * STEP, height: 16, class: "waits" }));
    text(x(2.5) + 6, queue + 12, "#4 waits", "small");
    measures(svg, x, text, queue + 40);
    pages(svg, text, 256);
    return svg;
  }

  // The times of #4: its arrival, its tokens, and what is measured between them.
  function measures(svg, x, text, y) {
    svg.append(shape("line", { x1: x(2.5), x2: x(12), y1: y, y2: y, class: "ink" }));
    svg.append(shape("line", { x1: x(2.5), x2: x(2.5), y1: y - 6, y2: y + 6, class: "ink" }));
    text(x(2.5) - 6, y + 4, "#4 arrives", "end small");
    for (const step of [9, 10, 11, 12]) svg.append(shape("circle", { cx: x(step), cy: y, r: 4.5, class: "hue3 prefill" }));
    text(x(12) + 8, y + 4, "tokens", "small");
    const between = (from, to, at, words) => {
      svg.append(shape("path", { d: `M${x(from) + 1} ${at - 5}v5H${x(to) - 1}v-5`, class: "ink" }));
      text((x(from) + x(to)) / 2, at + 13, words, "middle small strong");
    };
    between(2.5, 9, y + 14, "TTFT");
    between(9, 10, y + 14, "ITL");
    between(9, 12, y + 36, "TPOT = this / 3");
  }

  // Three pages of eight tokens: a full one, one that fills, and a free one.
  function pages(svg, text, y) {
    text(LEFT - 8, y + 13, "KV pages", "end soft");
    for (let token = 0; token < 24; token++) {
      const at = LEFT + token * 11 + Math.floor(token / 8) * 14;
      svg.append(shape("rect", { x: at, y, width: 10, height: 18, class: token < 12 ? "hue1 decode" : "track" }));
    }
    text(LEFT + 24 * 11 + 40, y + 13, "#2 fills a page and half of another, a third is free", "small");
  }

  function patterns() {
    const all = shape("defs", {});
    for (const hue of [0, 2]) {
      const pattern = shape("pattern", { id: `held${hue}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(-45)" });
      pattern.append(shape("rect", { width: 6, height: 6, class: "paper" }), shape("rect", { width: 6, height: 1.6, class: `hue${hue} prefill` }));
      all.append(pattern);
    }
    return all;
  }

  function shape(tag, attributes) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
    return node;
  }

  function open() {
    if (!$("help-picture").firstChild) {
      $("help-picture").append(drawing());
      for (const [term, meaning] of TERMS) $("help-terms").append(element("dt", "", term), element("dd", "", meaning));
    }
    $("help").showModal(); // Escape closes it, and the focus returns to where it was
  }

  function setUp() {
    $("help-open").addEventListener("click", open);
    $("help-close").addEventListener("click", () => $("help").close());
    $("help").addEventListener("click", (event) => event.target === $("help") && $("help").close());
    document.addEventListener("keydown", (event) => {
      if (event.key === "?" && !event.target.closest("input, textarea, select, dialog")) open();
    });
  }

  Object.assign(EB, { setUpHelp: setUp });
})(globalThis);
