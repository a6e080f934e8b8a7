// Saves a result: a recording that /race reads, a page to share that needs no server, a trace for Perfetto, and a picture. The
// trace is the one that dev/tools/trace_export.py makes of the recording.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const PROCESS = 1, STEPS_THREAD = 1, FIRST_SLOT = 10;
  const COLORS = { prefill: "thread_state_running", decode: "good", held: "bad", idle: "grey" };
  const MARGIN = 16, TITLE = 20, LINE = 18;

  // Lines of JSON: for each run its server, its arrivals and its steps, each with the labels that client.compare writes.
  function recording(answer, load) {
    return EB.whatIf.runsOf(answer).flatMap((run) => {
      const labels = `{"policy": ${JSON.stringify(run.name)}, "load": ${JSON.stringify(load)}, "repeat": 0, `;
      return [
        JSON.stringify({ slots: answer.slots, policy: run.policy }),
        ...run.arrivals.map((arrival) => JSON.stringify(arrival)),
        ...run.records.map((record) => labels + JSON.stringify(record).slice(1)),
      ];
    }).join("\n") + "\n";
  }

  // A trace in Chrome's format: a thread is a slot, a slice is an uninterrupted phase of a request there.
  function trace(steps) {
    const zero = steps.length ? steps[0].t : 0;
    const round = (value) => Math.round(value * 1000) / 1000;
    const micro = (moment) => round((moment - zero) * 1e6);
    const slice = (name, tid, begin, end, args) =>
      ({ ph: "X", pid: PROCESS, tid, name, ts: begin, dur: round(end - begin), cat: "step", args });
    const events = [], open = new Map(), slots = new Set();
    const close = (slot) => {
      const run = open.get(slot);
      if (!open.delete(slot)) return;
      const args = { id: run.id, iterations: [run.first, run.last], tokens: run.tokens, computed: run.computed };
      events.push({
        ...slice(`${run.id.slice(0, 8)} ${run.phase}`, FIRST_SLOT + slot, run.begin, run.end, args),
        cat: run.phase, cname: COLORS[run.phase] ?? "grey",
      });
    };
    for (const step of steps) {
      const begin = micro(step.t), end = micro(step.t + step.seconds);
      const { queue, policy, joined, left } = step;
      events.push(slice(`step ${step.n}`, STEPS_THREAD, begin, end, { queue, policy, joined, left, ...step.slot_steps }));
      const rows = step.members.filter((member) => member.phase !== "idle").length;
      for (const [name, args] of [["queue", { waiting: queue }], ["batch", { rows }], ["KV pages", { used: step.pages.used }]]) {
        events.push({ ph: "C", pid: PROCESS, name, ts: begin, args });
      }
      const taken = new Set(step.members.map((member) => member.slot));
      for (const member of step.members) {
        slots.add(member.slot);
        let run = open.get(member.slot);
        if (!run || run.id !== member.id || run.phase !== member.phase || joined.includes(member.id)) {
          close(member.slot);
          run = { id: member.id, phase: member.phase, begin, first: step.n, tokens: 0 };
          open.set(member.slot, run);
        }
        Object.assign(run, { end, last: step.n, computed: member.computed, tokens: run.tokens + member.tokens });
      }
      for (const slot of [...open.keys()]) if (!taken.has(slot)) close(slot);
    }
    for (const slot of [...open.keys()]) close(slot);
    const named = (name, tid, text) => ({ ph: "M", pid: PROCESS, tid, name, args: { name: text } });
    const policy = steps.length ? steps[steps.length - 1].policy : "nothing";
    const names = [named("process_name", 0, `effective-batching: ${policy}`), named("thread_name", STEPS_THREAD, "steps"),
      ...[...slots].sort((a, b) => a - b).map((slot) => named("thread_name", FIRST_SLOT + slot, `slot ${slot}`))];
    return { displayTimeUnit: "ms", traceEvents: [...names, ...events] };
  }

  const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  const escaped = (text) => text.replace(/[&<>"]/g, (character) => ESCAPES[character]);

  // The markup of a result, without its controls: only names of tags and classes, and escaped text.
  function markup(node) {
    if (node.nodeType === Node.TEXT_NODE) return escaped(node.data);
    if (node.nodeType !== Node.ELEMENT_NODE || node.hidden) return "";
    const name = node.localName;
    const inside = [...node.childNodes].map(markup).join("");
    return `<${name}${node.className ? ` class="${escaped(node.className)}"` : ""}>${inside}</${name}>`;
  }

  async function packed(value) {
    const stream = new Blob([JSON.stringify(value)]).stream().pipeThrough(new CompressionStream("gzip"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    let text = "";
    for (let k = 0; k < bytes.length; k += 0x8000) text += String.fromCharCode(...bytes.subarray(k, k + 0x8000));
    return btoa(text);
  }

  // The race's page with its styles, scripts and these runs inside, below the result.
  async function sharedPage(answer, card) {
    const get = async (path) => {
      const reply = await fetch(path);
      if (!reply.ok) throw new Error(`cannot read ${path}: HTTP ${reply.status}`);
      return reply.text();
    };
    const page = await get("race");
    const paths = (pattern) => [...page.matchAll(pattern)].map((match) => match[1]);
    const [styles, scripts] = await Promise.all([
      [...paths(/<link rel="stylesheet" href="(web\/[\w.]+)">/g), "web/card.css"], paths(/<script src="(web\/[\w.]+)"[^>]*><\/script>/g),
    ].map((all) => Promise.all(all.map(get))));
    const [{ arrivals, cut }] = EB.whatIf.runsOf(answer);
    const runs = Object.fromEntries(EB.whatIf.runsOf(answer).map((run) => [run.name, run.records]));
    const inside = await packed([{ load: card.heading, cut, runs, arrivals }]);
    const result = `<section id="card" class="panel"><h2>${escaped(card.heading)}</h2>`
      + `<p class="sub">${escaped(`${card.served()}. ${new Date().toISOString().slice(0, 10)}.`)}</p>`
      + `${markup(card.result)}${markup(card.state)}</section>`;
    const body = `<script type="application/gzip" id="recorded">${inside}</script>`
      + scripts.map((script) => `<script>${script}</script>`).join("");
    return page
      .replace(/\s*<script src="web[^>]*><\/script>/g, "")
      .replace(/\s*<link rel="(icon|stylesheet)"[^>]*>/g, "")
      .replace(/<img src="web[^>]*>/g, "")
      .replace(/<a [^>]*>[^<]*<\/a>/g, "")
      .replace(/<title>[^<]*/, () => `<title>${escaped(card.heading)}`)
      .replace(/<span class="badge">race<\/span>/, "")
      .replace(/(<p id="facts">)[^<]*/, "$1What policies make of the same requests, slot by slot.")
      .replace("<html ", '<html class="shared" ')
      .replace("</head>", () => styles.map((style) => `<style>${style}</style>`).join("") + "</head>")
      .replace(/(<main[^>]*>)/, (main) => `${main}${result}`)
      .replace("</body>", () => `${body}</body>`);
  }

  function captionOf(lane) {
    const figures = [...lane.figures.children].filter((part) => !part.hidden).map((part) => part.textContent).filter(Boolean);
    return `${lane.badge.textContent}, ${lane.name}: ${figures.join(", ")}`;
  }

  // The lanes, or if they are not shown the live picture, under the result in words.
  function drawn(card) {
    const shown = !card.lanes.box.hidden;
    const parts = shown
      ? card.lanes.lanes.map((lane) => [captionOf(lane), lane.canvas])
      : [["", document.getElementById("picture")]];
    const captions = [...card.result.querySelectorAll(".said li")].map((line) => line.textContent);
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const ratio = Math.max(1, devicePixelRatio);
    const width = Math.max(...parts.map(([, canvas]) => canvas.clientWidth)) + 2 * MARGIN;
    const height = 2 * MARGIN + TITLE + LINE * (captions.length + 1)
      + parts.reduce((sum, [text, canvas]) => sum + canvas.clientHeight + 8 + (text ? LINE : 0), 0);
    const sheet = EB.element("canvas");
    Object.assign(sheet, { width: width * ratio, height: height * ratio });
    const context = sheet.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = color("--panel");
    context.fillRect(0, 0, width, height);
    context.textBaseline = "top";
    let y = MARGIN;
    const write = (text, font, ink, tall) => {
      Object.assign(context, { font: `${font} system-ui, sans-serif`, fillStyle: color(ink) });
      context.fillText(text, MARGIN, y, width - 2 * MARGIN);
      y += tall;
    };
    write(card.heading, "600 15px", "--ink", TITLE);
    for (const text of captions) write(text, "13px", "--ink", LINE);
    write(card.served(), "12px", "--soft", LINE);
    for (const [text, canvas] of parts) {
      if (text) write(text, "12px", "--soft", LINE);
      context.drawImage(canvas, MARGIN, y, canvas.clientWidth, canvas.clientHeight);
      y += canvas.clientHeight + 8;
    }
    return new Promise((done) => sheet.toBlob(done, "image/png"));
  }

  function download(name, blob) {
    const link = EB.element("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // Add the buttons that save a card's result.
  function setUp(card) {
    const text = (value, type) => new Blob([value], { type });
    const ways = {
      "Recording": ["jsonl", async () => text(recording(card.answer, card.heading), "application/jsonl")],
      "Page to share": ["html", async () => text(await sharedPage(card.answer, card), "text/html")],
      "Trace": ["trace.json", async () => text(JSON.stringify(trace(EB.whatIf.runsOf(card.answer)[0].records)), "application/json")],
      "Picture": ["png", () => drawn(card)],
    };
    const about = { "Recording": "steps of all lanes, which /race reads", "Page to share": "one file that opens without a server",
      "Trace": "the first lane, for ui.perfetto.dev", "Picture": "the lanes, or else the live picture, with a caption" };
    card.tools.append(EB.element("span", "sub", "Save:"));
    for (const [name, [ending, make]] of Object.entries(ways)) {
      const button = card.button(name, async () => {
        try {
          download(`what-if-${card.answer.served}.${ending}`.replace(/[^\w.+-]/g, "_"), await make());
        } catch (error) {
          card.fail(error.message);
        }
      });
      button.title = `save ${about[name]}`;
    }
  }

  Object.assign(EB, { setUpSave: setUp });
})(globalThis);
