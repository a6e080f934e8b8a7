// The live page. Records from /events go into the model, and a cursor marks the last step shown. Live, the cursor is the
// newest step; when paused, stepped, slowed or replayed, it is an earlier one. Everything on the page follows from it.
"use strict";
(function () {
  const EB = globalThis.EB;
  const $ = (id) => document.getElementById(id);
  const ZOOMS = [1, 1.5, 2, 3, 4, 6, 8, 12, 18, 26];
  const TIMES = [10, 20, 40, 80, 160, 320, 640, 1280, 2560]; // pixels per second
  const MINUTE = 60;

  const live = new EB.Model();
  let model = live; // or the model of a replayed file
  let facts = {}, shadow = null;
  let key = sessionStorage.getItem("eb-key") || "";
  let zoom = innerWidth < 600 ? 3 : 4, time = 3;
  let axis = "steps";
  let cursor = -1; // the number of the step shown; -1 is the newest
  let playing = true, speed = 1, playhead = 0; // the moment of the run shown while it is slowed or replayed
  let chosen = 0, hover = null, wanted = null;
  let clockOffset = 0; // the loop's clock minus ours, in seconds
  let connection = "connecting";
  let drawn = null, budget = 0, refreshed = 0, charted = 0;

  const picture = new EB.Picture($("picture"));
  const waste = new EB.WasteBar($("waste"), $("waste-legend"));
  const table = new EB.Requests($("rows"), choose);
  const chart = makeChart();

  function headers(more) {
    return key ? { ...more, Authorization: `Bearer ${key}` } : more;
  }

  const feed = new EB.Feed(".", {
    state(state, fresh) {
      if (fresh && live.columns.length) live.clear();
      if (fresh) chosen = model === live ? 0 : chosen;
      clockOffset = state.now - performance.now() / 1000;
      facts = {
        policy: state.policy, slots: state.slots, maxQueue: state.max_queue, model: state.model, epoch: state.epoch,
        device: state.device, dtype: state.dtype, parameters: state.parameters, pages: state.pages_total, run: state.run,
        chats: state.chats,
      };
      tryIt.ask(state.chats);
      for (const arrival of state.waiting) live.arrival(arrival);
      shadow = state.shadow;
      showFacts();
    },
    step(record) {
      live.add(record);
      if (record.policy === facts.policy) return;
      facts = { ...facts, policy: record.policy }; // the policy event was missed
      if (model === live) showFacts();
    },
    shadow(report) {
      shadow = report;
      if (model === live) EB.showShadow(shadow);
    },
    policy(change) {
      facts = { ...facts, policy: change.policy, maxQueue: change.max_queue };
      if (model === live) showFacts();
    },
    arrival(arrival) {
      live.arrival(arrival);
      if (arrival.id === wanted && model === live) choose(live.request(wanted).number);
    },
    departure(departure) {
      live.departure(departure);
    },
    gap() {
      live.gap();
    },
    status(name, text) {
      connection = name;
      $("banner").hidden = !text || model !== live;
      EB.put("banner", text);
      $("key-form").hidden = name !== "locked";
      if (name === "locked" && document.activeElement === document.body) $("key").focus();
      showStatus();
    },
  }, { key: () => key });

  const tryIt = EB.setUpTry({
    headers,
    sent(id) {
      wanted = id;
    },
  });

  function showFacts() {
    EB.put("policy", facts.policy || "…");
    EB.showShadow(shadow);
    const size = facts.parameters ? ` (${(facts.parameters / 1e6).toFixed(1)} M)` : "";
    const where = facts.device === "none" ? "" : ` on ${facts.device}, ${facts.dtype}`; // a mock computes nowhere
    EB.put("facts", facts.model ? `${facts.model}${size}${where}, ${facts.slots} slots` : "");
    document.title = `${facts.policy || ""} · effective-batching`;
    const bearer = key ? " -H 'Authorization: Bearer KEY'" : "";
    const [path, example] = facts.chats
      ? ["v1/chat/completions -H 'Content-Type: application/json'",
         '{"temperature":0,"messages":[{"role":"user","content":"What is the capital of France?"}]}']
      : ["inference", '{"prompt":"ROMEO:","num_tokens":40}'];
    EB.put("curl", `curl -X POST ${location.origin}/${path}${bearer} -d '${example}'`);
  }

  function showStatus() {
    const replayed = model !== live;
    const name = !playing ? "paused" : replayed ? "live" : connection;
    $("status").className = ["live", "paused"].includes(name) ? name : "lost";
    const word = !playing ? "paused" : replayed ? "replay" : speed < 1 ? "slowed" : connection;
    EB.put("status-text", word);
    EB.put("pause", playing ? "Pause" : "Resume");
    $("pause").setAttribute("aria-pressed", String(!playing));
  }

    function follows() {
    return model === live && cursor < 0;
  }

  function shownIndex() {
    return cursor < 0 ? model.columns.length - 1 : model.indexOf(cursor);
  }

  function setCursor(n) {
    cursor = n;
    const column = model.columns[shownIndex()];
    if (column) playhead = column.end;
  }

  function play(on) {
    if (!on && cursor < 0 && model.last) setCursor(model.last.n);
    if (on && model === live && speed >= 1) cursor = -1;
    if (on && model !== live && cursor >= model.last.n) setCursor(model.columns[0].n);
    playing = on;
    showStatus();
  }

  function step(by) {
    if (!model.columns.length) return;
    if (playing) play(false);
    const index = Math.max(0, Math.min(model.columns.length - 1, shownIndex() + by));
    setCursor(model.columns[index].n);
    inspectCursor();
  }

  function advance(elapsed) {
    if (!playing || follows() || !model.last) return;
    playhead = Math.max(playhead, model.columns[0].t) + elapsed * speed;
    const index = model.indexAt(playhead);
    if (index >= 0) cursor = model.columns[index].n;
    if (playhead < model.last.end) return;
    if (model === live) {
      cursor = speed < 1 ? model.last.n : -1;
      playhead = model.last.end;
    } else {
      cursor = model.last.n;
      play(false);
    }
  }

    let before = performance.now();

  function frame(now) {
    requestAnimationFrame(frame);
    const elapsed = Math.min(0.25, (now - before) / 1000);
    before = now;
    advance(elapsed);
    // When drawing is slow, skip frames: it may take at most half of the time.
    if (now < budget) return;
    const index = shownIndex();
    const at = follows() ? now / 1000 + clockOffset : null;
    const scrolls = axis === "time" && at !== null && model.last && at - model.last.end < MINUTE;
    const stamp = [model.version, index, zoom, time, axis, chosen, hover?.index, hover?.slot, picture.canvas.clientWidth].join();
    if (stamp !== drawn || scrolls) {
      drawn = stamp;
      const began = performance.now();
      picture.draw(model, {
        index, zoom: ZOOMS[zoom], time: axis === "time" ? TIMES[time] : 0, at: at ?? 0, selected: chosen, hover,
        origin: model.columns[0] ? origin() : 0,
      });
      const spent = performance.now() - began;
      budget = spent > 8 ? performance.now() + spent : 0;
      frames.push(spent);
      if (frames.length > 240) frames.shift();
    }
    if (now - refreshed > 250) {
      refreshed = now;
      refresh(index, at);
    }
    if (now - charted > 1000) {
      charted = now;
      drawChart(index, at);
    }
  }
  const frames = [];

  // Times are relative to the first known step of the run.
  function origin() {
    if (model.origin === undefined || model.origin > model.columns[0].t) model.origin = model.columns[0].t;
    return model.origin;
  }

  function refresh(index, at) {
    const any = model.columns.length > 0 || (model === live && live.requests.size > 0);
    $("empty").hidden = any;
    const requests = model.requestsAt(index, { live: follows() });
    const tiles = model.tiles(index, 10, at);
    const waiting = model === live && follows() ? requests.waitingCount : tiles?.waiting ?? 0;
    EB.showTiles(tiles, waiting, facts);
    waste.show(tiles?.waste);
    table.show(requests, at ?? model.columns[index]?.end, chosen);
    if (model !== live && model.columns.length) {
      if (document.activeElement !== $("seek")) $("seek").value = String(index);
    }
    const label = tiles
      ? `Slots by iterations: ${tiles.running} of ${tiles.slots} slots taken, ${waiting} waiting, iteration ${model.columns[index].n}`
      : "Slots by iterations: no steps yet";
    if ($("picture").getAttribute("aria-label") !== label) $("picture").setAttribute("aria-label", label);
    const rate = tiles && tiles.span ? tiles.steps / tiles.span : 0;
    if (!hover) {
      EB.put("inspect", follows() && rate > 100
        ? `${Math.round(rate).toLocaleString("en")} iterations per second: choose speed 1/50 to follow them.`
        : "Point at a cell or use the arrow keys to inspect it.");
    }
    refreshDetail();
  }

  function makeChart() {
    const ink = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const line = (label, scale, name, more) => ({ label, scale, stroke: ink(name), width: 1.5, points: { show: false }, ...more });
    const side = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 0.5 }, ticks: { show: false }, font: "10px system-ui", size: 32 };
    return new uPlot({
      width: 300, height: 120, legend: { show: false }, cursor: { show: false }, padding: [6, 2, 0, 0],
      scales: { x: { time: false }, tokens: { range: (u, low, high) => [0, Math.max(10, high * 1.1)] }, requests: { range: (u, low, high) => [0, Math.max(4, high * 1.1)] } },
      axes: [
        { ...side, size: 18, values: (u, ticks) => ticks.map((t) => (t ? `${t} s` : "now")) },
        { ...side, scale: "tokens" },
        { ...side, scale: "requests", side: 1, grid: { show: false } },
      ],
      series: [{}, line("tokens/s", "tokens", "--accent", { fill: () => `${ink("--accent")()}33` }),
        line("running", "requests", "--good", { paths: uPlot.paths.stepped({ align: 1 }) }),
        line("waiting", "requests", "--held", { dash: [4, 3], paths: uPlot.paths.stepped({ align: 1 }) })],
    }, [[-MINUTE, 0], [0, 0], [0, 0], [0, 0]], $("chart"));
  }

  function drawChart(index, at) {
    const width = $("chart").clientWidth;
    if (width && width !== chart.width) chart.setSize({ width, height: 120 });
    const end = at ?? model.columns[index]?.end ?? 0;
    const seconds = Array.from({ length: MINUTE + 1 }, (_, k) => k - MINUTE);
    const tokens = new Array(MINUTE + 1).fill(0);
    const running = new Array(MINUTE + 1).fill(0);
    const waiting = new Array(MINUTE + 1).fill(0);
    for (let i = index; i >= 0; i--) {
      const column = model.columns[i];
      const place = MINUTE - Math.max(0, Math.floor(end - column.end));
      if (place < 0) break;
      tokens[place] += column.output;
      running[place] = Math.max(running[place], model.running(column));
      waiting[place] = Math.max(waiting[place], column.queue);
    }
    tokens[MINUTE] = tokens[MINUTE - 1]; // the current second is incomplete
    chart.setData([seconds, tokens, running, waiting]);
  }

    let detailOf = 0, detailAt = 0, detail = null, problem = "";

  function choose(number) {
    chosen = chosen === number ? 0 : number;
    detail = null;
    detailOf = 0;
    problem = "";
    refreshDetail(true);
    if (chosen) $("detail").scrollIntoView({ block: "nearest" });
  }

  async function refreshDetail(force) {
    const request = model.requests.get(chosen);
    const close = () => choose(chosen);
    if (!request) {
      if (!$("detail").hidden || force) EB.showDetail($("detail"), null);
      if (chosen && model.columns.length) chosen = 0;
      return;
    }
    if (detailOf === chosen && (detail?.state === "finished" || performance.now() - detailAt < 1000)) return;
    const now = follows() ? performance.now() / 1000 + clockOffset : model.columns[shownIndex()]?.end ?? 0;
    if (detailOf !== chosen) EB.showDetail($("detail"), request, null, "", close, now); // show immediately what this page knows
    const requested = (detailOf = chosen);
    detailAt = performance.now();
    if (model === live) {
      try {
        const id = encodeURIComponent(request.id.split("/")[0]);
        const reply = await fetch(`requests/${id}`, { headers: headers({}) });
        if (chosen !== requested) return;
        detail = reply.ok ? await reply.json() : null;
        problem = reply.ok ? "" : "The server keeps only the last 1,000 requests, and this one is older.";
      } catch {
        problem = "The server cannot be reached.";
      }
    }
    if (chosen === requested && !$("detail").contains(document.activeElement)) {
      EB.showDetail($("detail"), request, detail, problem, close, now);
    }
  }

    $("pause").addEventListener("click", () => play(!playing));
  $("back").addEventListener("click", () => step(-1));
  $("forward").addEventListener("click", () => step(1));
  $("in").addEventListener("click", () => magnify(1));
  $("out").addEventListener("click", () => magnify(-1));
  $("speed").addEventListener("change", () => {
    speed = Number($("speed").value);
    if (model === live && model.last) {
      if (speed < 1 && cursor < 0) setCursor(model.last.n);
      if (speed >= 1 && playing) cursor = -1;
    }
    showStatus();
  });
  $("axis").addEventListener("change", () => {
    axis = $("axis").value;
    EB.put("axis-name", axis === "time" ? "time" : "iterations");
  });
  $("seek").addEventListener("input", () => {
    if (playing) play(false);
    setCursor(model.columns[Number($("seek").value)].n);
  });

  function magnify(by) {
    if (axis === "time") time = Math.max(0, Math.min(TIMES.length - 1, time + by));
    else zoom = Math.max(0, Math.min(ZOOMS.length - 1, zoom + by));
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, button, .scroll, a, summary")) return;
    const act = {
      " ": () => play(!playing), ArrowLeft: () => step(-1), ArrowRight: () => step(1),
      "+": () => magnify(1), "=": () => magnify(1), "-": () => magnify(-1),
      ArrowUp: () => moveHover(-1), ArrowDown: () => moveHover(1),
      Enter: () => chooseHover(), Escape: () => chosen && choose(chosen),
    }[event.key];
    if (!act || (event.key.startsWith("Arrow") && event.target !== $("picture") && event.target !== document.body)) return;
    if ((event.key === "ArrowUp" || event.key === "ArrowDown") && event.target !== $("picture")) return;
    event.preventDefault();
    act();
  });

  function inspectCursor() {
    const index = shownIndex();
    hover = { index, slot: hover ? hover.slot : -1 };
    EB.put("inspect", EB.describe(model, hover));
  }

  function moveHover(by) {
    if (!model.columns.length) return;
    if (playing) play(false);
    const slot = Math.max(0, Math.min(picture.rows - 1, (hover?.slot ?? -1) + by));
    hover = { index: shownIndex(), slot };
    EB.put("inspect", EB.describe(model, hover));
  }

  function chooseHover() {
    const column = hover && model.columns[hover.index];
    const number = column && hover.slot >= 0 && hover.slot < column.slots ? column.who[hover.slot] : 0;
    if (number) choose(number);
  }

  const canvas = $("picture");
  canvas.addEventListener("pointermove", (event) => {
    hover = picture.hit(event.offsetX, event.offsetY);
    if (hover) EB.put("inspect", EB.describe(model, hover));
  });
  canvas.addEventListener("pointerleave", () => {
    hover = null;
  });
  canvas.addEventListener("click", (event) => {
    hover = picture.hit(event.offsetX, event.offsetY);
    if (hover) chooseHover();
  });

  $("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
    const theme = dark ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("eb-theme", theme);
    } catch {
      // storage is blocked, so the choice lasts only for this page
    }
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

  function repaint() {
    picture.restyle();
    drawn = null;
    chart.redraw();
  }

  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    sessionStorage.setItem("eb-key", key);
  });

  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("curl").textContent);
      EB.put("copy", "Copied");
    } catch {
      getSelection().selectAllChildren($("curl"));
      EB.put("copy", "Selected: press Ctrl-C");
    }
  });

    async function replay(file) {
    const runs = EB.parseRuns(await file.text());
    if (!runs.length) {
      $("banner").hidden = false;
      EB.put("banner", `${file.name} contains no step records. Drop an iterations.jsonl file.`);
      return;
    }
    const choice = $("replay-run");
    choice.hidden = runs.length < 2;
    choice.replaceChildren(...runs.map((run, k) => new Option([run.name || `run ${k + 1}`, run.load].filter(Boolean).join(", "), String(k))));
    choice.onchange = () => show(EB.modelOf(runs[Number(choice.value)]), file.name);
    show(EB.modelOf(runs[0]), file.name);
  }

  function show(other, name) {
    model = other;
    chosen = 0;
    hover = null;
    picture.rows = 0;
    $("replay").hidden = model === live;
    $("banner").hidden = model !== live || connection === "live";
    EB.put("replay-name", name);
    EB.showShadow(model === live ? shadow : null);
    if (model === live) {
      cursor = -1;
      playing = true;
    } else {
      $("seek").max = String(model.columns.length - 1);
      setCursor(model.columns[0].n);
      playing = true;
      EB.put("policy", model.last.policy);
    }
    if (model === live) showFacts();
    showStatus();
  }

  $("live").addEventListener("click", () => show(live, ""));
  $("file").addEventListener("change", () => $("file").files[0] && replay($("file").files[0]));
  EB.onDrop((files) => replay(files[0]));

  showFacts();
  requestAnimationFrame(frame);
  // For tests and debugging.
  EB.page = {
    get model() { return model; }, live, feed, frames, picture, show,
    get cursor() { return cursor; }, get index() { return shownIndex(); },
  };
})();
