// The live page. Records from /events go into the model, the player's cursor marks the step shown, and everything on the
// page follows from the two.
"use strict";
(function () {
  const EB = globalThis.EB;
  const $ = (id) => document.getElementById(id);
  const ZOOMS = [1, 1.5, 2, 3, 4, 6, 8, 12, 18, 26];
  const TIMES = [10, 20, 40, 80, 160, 320, 640, 1280, 2560]; // pixels per second
  const MINUTE = 60;

  const live = new EB.Model();
  let facts = {}, failure = null;
  let key = sessionStorage.getItem("eb-key") || "";
  let zoom = innerWidth < 600 ? 3 : 4, time = 3;
  let axis = "steps";
  let hover = null; // the cell under the pointer or the keyboard's cursor
  let pressed = null; // the cell at which the pointer was pressed
  let area = null; // the cells between it and the pointer, by the numbers of their steps
  let pointed = 0; // the request whose row in the table is under the pointer
  let mine = ""; // the id of the request that the prompt box sent last
  let clockOffset = 0; // the loop's clock minus ours, in seconds
  let connection = "connecting";
  let lost = "", outage = ""; // why the page, and why a queue, gets no answers
  let drawn = null, budget = 0, refreshed = 0, charted = 0, before = performance.now();
  const frames = []; // how long the last ones took to draw

  const player = new EB.Player(live, showStatus);
  const picture = new EB.Picture($("picture"));
  const waste = new EB.WasteBar($("waste"), $("waste-legend"));
  const explain = new EB.Explain($("detail"), player, { now: momentShown, epoch: () => facts.epoch, headers });
  const table = new EB.Requests($("rows"), (number) => explain.choose(number), (number) => (pointed = number));
  const chart = new EB.MinuteChart($("chart"), $("latency"));
  EB.setUpHelp();
  const story = EB.setUpStory({ headers, live, facts: () => facts, axis: setAxis });
  const card = new EB.Card($("card"), { headers, facts: () => facts, live });
  const experiment = new EB.Experiment($("experiment"));
  const load = EB.setUpLoad({ headers, ended: (load) => card.after(load) });
  const playground = new EB.Playground({
    headers,
    sent(id) {
      mine = id;
      $("own-key").hidden = false;
    },
    explain(id) {
      const number = live.numbers.get(id);
      if (number && number !== explain.chosen) explain.choose(number);
    },
  });

  function headers(more) {
    return key ? { ...more, Authorization: `Bearer ${key}` } : more;
  }

  const feed = new EB.Feed(".", {
    state(state, fresh) {
      if (fresh && live.columns.length) live.clear();
      if (fresh && player.isLive) explain.chosen = 0;
      clockOffset = state.now - performance.now() / 1000;
      facts = {
        policy: state.policy, slots: state.slots, maxQueue: state.max_queue, model: state.model, epoch: state.epoch,
        device: state.device, dtype: state.dtype, parameters: state.parameters, pages: state.pages_total, run: state.run,
        chats: state.chats, demo: state.demo, instead: state.instead, queues: state.device === "upstream",
      };
      document.body.classList.toggle("queue", facts.queues);
      $("try").hidden = Boolean(state.watched); // requests go to the engine itself
      if (facts.queues || state.watched) card.fitQueue();
      live.connected(state);
      playground.fit(state);
      if (fresh && state.demo) zoom = innerWidth < 600 ? 4 : 6; // to be read from the last row of a hall
      if (fresh) story.ready();
      if (fresh) experiment.reset();
      failure = state.last_failure;
      EB.put("policy-failure", failure?.now === state.policy ? EB.failureText(failure) : "");
      showFacts();
    },
    step(record) {
      live.add(record);
      if (record.policy === facts.policy) return;
      facts = { ...facts, policy: record.policy }; // the policy event was missed
      if (player.isLive) showFacts();
    },
    policy(change) {
      facts = { ...facts, policy: change.policy, maxQueue: change.max_queue };
      EB.put("policy-failure", change.last_failure?.time === failure?.time ? "" : EB.failureText(change.last_failure));
      failure = change.last_failure;
      experiment.switched(change);
      if (player.isLive) showFacts();
    },
    receipt: (receipt) => experiment.receipt(receipt),
    arrival: (arrival) => live.arrival(arrival),
    departure: (departure) => live.departure(departure),
    number: ({ id, number }) => live.number(id, number),
    gap: () => live.gap(),
    status(name, text) {
      connection = name;
      lost = text;
      showBanner();
      $("key-form").hidden = name !== "locked";
      if (name === "locked" && document.activeElement === document.body) $("key").focus();
      showStatus();
    },
  }, { key: () => key });

  // What NVML tells of the card, every five seconds; nothing without it.
  let gauges = "";
  setInterval(async () => {
    if (!facts.device?.startsWith("cuda") || document.hidden || !player.isLive) return;
    const reply = await fetch("stats", { headers: headers({}) }).catch(() => null);
    const gpu = (reply?.ok && (await reply.json()).engine?.gpu) || {};
    const value = (name, by, unit) => (`eb_gpu_${name}` in gpu ? `${Math.round(gpu[`eb_gpu_${name}`] * by)} ${unit}` : null);
    const shown = [value("utilization_ratio", 100, "%"), value("memory_used_bytes", 2 ** -30, "GiB"),
      value("power_watts", 1, "W"), value("temperature_celsius", 1, "°C")].filter(Boolean);
    gauges = shown.length ? `, GPU ${shown.join(", ")}` : "";
    showFacts();
  }, 5000);

  function showBanner() {
    $("banner").hidden = !(lost || outage) || !player.isLive;
    EB.put("banner", lost || outage);
  }

  // The feed of a queue goes on while its upstreams are down, so ask for its health.
  setInterval(async () => {
    if (!facts.queues || connection !== "live") return;
    const reply = await fetch("health").catch(() => null);
    outage = (await reply?.json().catch(() => null))?.reason ?? "";
    showBanner();
  }, 5000);

  function showFacts() {
    EB.put("policy", facts.policy || "…");
    const size = facts.parameters ? ` (${(facts.parameters / 1e6).toFixed(1)} M)` : "";
    const where = facts.device === "none" ? "" : ` on ${facts.device}${facts.dtype && `, ${facts.dtype}`}`; // a queue computes nowhere
    const what = facts.queues ? `queue before ${facts.model}` : facts.instead ? "no model" : `${facts.model}${size}${where}`;
    const how = facts.instead ? `: ${facts.instead}` : gauges;
    EB.put("facts", facts.model ? `${what}, ${EB.count(facts.slots)} slots${how}` : "");
    $("facts").title = facts.model ?? "";
    document.title = `${facts.policy || ""} · effective-batching`;
    const bearer = key ? " -H 'Authorization: Bearer KEY'" : "";
    const [path, example] = facts.chats || facts.queues
      ? ["v1/chat/completions -H 'Content-Type: application/json'",
         `{${facts.queues ? '"model":"MODEL",' : ""}"temperature":0,"messages":[{"role":"user","content":"What is the capital of France?"}]}`]
      : ["inference", '{"prompt":"ROMEO:","num_tokens":40}'];
    EB.put("curl", `curl -X POST ${location.origin}/${path}${bearer} -d '${example}'`);
  }

  function showStatus() {
    const { playing, isLive, speed } = player;
    const name = !playing ? "paused" : !isLive ? "live" : connection;
    $("status").className = ["live", "paused"].includes(name) ? name : "lost";
    EB.put("status-text", !playing ? "paused" : !isLive ? "replay" : speed < 1 ? "slowed" : connection);
    EB.put("pause", playing ? "Pause" : "Resume");
    $("pause").setAttribute("aria-pressed", String(!playing));
  }

  // The current time on the clock of the live records.
  function liveClock() {
    return performance.now() / 1000 + clockOffset;
  }

  function momentShown() {
    return player.follows ? liveClock() : player.column?.end ?? 0;
  }

  function frame(now) {
    requestAnimationFrame(frame);
    const elapsed = Math.min(0.25, (now - before) / 1000);
    before = now;
    player.advance(elapsed);
    // When drawing is slow, skip frames: it may take at most half of the time.
    if (now < budget) return;
    const { index } = player;
    const at = player.follows ? now / 1000 + clockOffset : null;
    story.tick(player, now);
    draw(index, at);
    if (now - refreshed > 250) {
      refreshed = now;
      refresh(index, at);
    }
    if (now - charted > 1000) {
      charted = now;
      chart.draw(player.model, index, at);
      experiment.draw(liveClock());
      load.fit(live);
    }
  }

  // Draw the picture if anything that it shows has changed.
  function draw(index, at) {
    const { model } = player;
    const scrolls = axis === "time" && at !== null && model.last && at - model.last.end < MINUTE;
    const selected = pointed || explain.chosen;
    const own = model.numbers.get(mine) ?? 0;
    const { mark, lit } = story;
    const stamp = [model.version, index, zoom, time, axis, selected, own, hover?.index, hover?.slot, JSON.stringify(area), picture.canvas.clientWidth,
      mark?.text, lit].join();
    if (stamp === drawn && !scrolls) return;
    drawn = stamp;
    const began = performance.now();
    picture.draw(model, {
      index, zoom: ZOOMS[zoom], time: axis === "time" ? TIMES[time] : 0, at: at ?? 0, selected, own, hover, mark, lit, area: cellsOf(area),
      origin: model.columns[0] ? origin(model) : 0,
    });
    const spent = performance.now() - began;
    budget = spent > 8 ? performance.now() + spent : 0;
    frames.push(spent);
    if (frames.length > 240) frames.shift();
  }

  // Times are relative to the first known step of the run.
  function origin(model) {
    if (model.origin === undefined || model.origin > model.columns[0].t) model.origin = model.columns[0].t;
    return model.origin;
  }

  function refresh(index, at) {
    const { model, follows, isLive } = player;
    $("empty").hidden = model.columns.length > 0 || (isLive && live.requests.size > 0);
    const requests = model.requestsAt(index, { live: follows });
    const tiles = model.tiles(index, 10, at);
    const waiting = follows ? requests.waitingCount : tiles?.waiting ?? 0;
    EB.showTiles(tiles, waiting, facts);
    waste.show(tiles?.waste);
    table.show(requests, at ?? model.columns[index]?.end, { chosen: explain.chosen, own: mine, pointed: requestAt(hover) });
    if (!isLive && model.columns.length && document.activeElement !== $("seek")) $("seek").value = String(index);
    const label = tiles
      ? `Slots by iterations: ${tiles.running} of ${tiles.slots} slots taken, ${EB.count(waiting)} waiting, iteration ${EB.count(model.columns[index].n)}`
      : "Slots by iterations: no steps yet";
    if ($("picture").getAttribute("aria-label") !== label) $("picture").setAttribute("aria-label", label);
    const rate = tiles && tiles.span ? tiles.steps / tiles.span : 0;
    if (!hover && !area) {
      EB.put("inspect", follows && rate > 100
        ? `${EB.count(rate)} iterations per second: choose speed 1/50 to follow them.`
        : "Point at a cell to inspect it, click it to have its request explained, or use the arrow keys and Enter.");
    }
    explain.refresh();
  }

  $("pause").addEventListener("click", () => player.play(!player.playing));
  $("back").addEventListener("click", () => stepBy(-1));
  $("forward").addEventListener("click", () => stepBy(1));
  $("in").addEventListener("click", () => magnify(1));
  $("out").addEventListener("click", () => magnify(-1));
  $("speed").addEventListener("change", () => player.setSpeed(Number($("speed").value)));
  $("axis").addEventListener("change", () => setAxis($("axis").value));
  $("seek").addEventListener("input", () => {
    if (player.playing) player.play(false);
    player.moveTo(player.model.columns[Number($("seek").value)].n);
  });

  // Set what a column of the picture shows; return what it showed.
  function setAxis(name = axis) {
    const before = axis;
    axis = $("axis").value = name;
    EB.put("axis-name", axis === "time" ? "time" : "iterations");
    return before;
  }

  function magnify(by) {
    if (axis === "time") time = Math.max(0, Math.min(TIMES.length - 1, time + by));
    else zoom = Math.max(0, Math.min(ZOOMS.length - 1, zoom + by));
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, dialog")) return;
    if (event.key === "Escape") area = null;
    if (event.key === "Escape" && explain.chosen) explain.choose(explain.chosen);
    if (event.target.closest("button, .scroll, a, summary")) return;
    const act = {
      " ": () => player.play(!player.playing), ArrowLeft: () => stepBy(-1), ArrowRight: () => stepBy(1),
      "+": () => magnify(1), "=": () => magnify(1), "-": () => magnify(-1),
      ArrowUp: () => moveHover(-1), ArrowDown: () => moveHover(1),
      Enter: () => chooseHover(),
    }[event.key];
    if (!act || (event.key.startsWith("Arrow") && event.target !== $("picture") && event.target !== document.body)) return;
    if ((event.key === "ArrowUp" || event.key === "ArrowDown") && event.target !== $("picture")) return;
    event.preventDefault();
    act();
  });

  function inspect(cell) {
    hover = cell;
    if (hover && !area) EB.put("inspect", EB.describe(player.model, hover));
  }

  // The columns and slots of an area; null if this page no longer has all of its steps.
  function cellsOf(area) {
    const { model } = player;
    if (!area || model.columns[0]?.n > area.first) return null;
    return { from: model.indexOf(area.first), to: model.indexOf(area.last), top: area.top, bottom: area.bottom };
  }

  function drag(cell) {
    if (!cell || (cell.index === pressed.index && cell.slot === pressed.slot && !area)) return;
    if (player.playing) player.play(false); // the picture must not move away from under the pointer
    const { columns } = player.model;
    const slots = [pressed.slot, cell.slot].map((slot) => (slot < 0 ? picture.rows - 1 : slot)).sort((a, b) => a - b);
    const steps = [pressed.index, cell.index].map((index) => columns[index].n).sort((a, b) => a - b);
    area = { first: steps[0], last: steps[1], top: slots[0], bottom: slots[1] };
    EB.put("inspect", EB.sumUp(player.model, cellsOf(area)));
  }

  function stepBy(by) {
    if (!player.model.columns.length) return;
    player.step(by);
    inspect({ index: player.index, slot: hover ? hover.slot : -1 });
  }

  function moveHover(by) {
    if (!player.model.columns.length) return;
    if (player.playing) player.play(false);
    inspect({ index: player.index, slot: Math.max(0, Math.min(picture.rows - 1, (hover?.slot ?? -1) + by)) });
  }

  // The number of the request in a cell of the picture; 0 is none.
  function requestAt(cell) {
    const column = cell && player.model.columns[cell.index];
    return column && cell.slot >= 0 && cell.slot < column.slots ? column.who[cell.slot] : 0;
  }

  function chooseHover() {
    const number = requestAt(hover);
    if (number) explain.choose(number);
  }

  const canvas = $("picture");
  const cellAt = (event) => picture.hit(event.offsetX, event.offsetY);
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") return; // it scrolls the page
    area = null;
    pressed = cellAt(event);
  });
  canvas.addEventListener("pointermove", (event) => (pressed ? drag(cellAt(event)) : inspect(cellAt(event))));
  canvas.addEventListener("pointerleave", () => inspect(null));
  addEventListener("pointerup", () => (pressed = null));
  canvas.addEventListener("click", (event) => {
    if (area) return; // the end of a drag
    inspect(cellAt(event));
    chooseHover();
  });

  // Explain a request by its number, with or without #, or by its id or the beginning of it.
  $("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("find-what").value.trim().replace(/^#/, "");
    const { model } = player;
    const id = [...model.numbers.keys()].find((id) => id === text) ?? [...model.numbers.keys()].find((id) => id.startsWith(text));
    const number = model.requests.has(Number(text)) ? Number(text) : model.numbers.get(id);
    EB.showError("find-error", number ? "" : `This page knows no request ${text}.`);
    if (number && number !== explain.chosen) explain.choose(number);
  });

  EB.onTheme(() => {
    picture.restyle();
    drawn = null;
    chart.redraw();
  });

  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    sessionStorage.setItem("eb-key", key);
  });

  $("copy").addEventListener("click", () => EB.copy($("copy"), $("curl")));

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

  function show(model, name) {
    explain.chosen = 0;
    hover = area = null;
    picture.rows = 0;
    player.open(model);
    const { isLive } = player;
    $("replay").hidden = isLive;
    showBanner();
    EB.put("replay-name", name);
    if (isLive) {
      showFacts();
    } else {
      $("seek").max = String(model.columns.length - 1);
      EB.put("policy", model.last.policy);
    }
  }

  $("live").addEventListener("click", () => show(live, ""));
  $("file").addEventListener("change", () => $("file").files[0] && replay($("file").files[0]));
  EB.onDrop((files) => replay(files[0]));

  showFacts();
  requestAnimationFrame(frame);
  // For tests and debugging.
  EB.page = {
    get model() { return player.model; }, live, feed, frames, picture, show, player, explain, playground, story, card, experiment,
    get cursor() { return player.cursor; }, get index() { return player.index; },
  };
})();
