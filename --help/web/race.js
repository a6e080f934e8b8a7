// Runs side by side on one clock; each lane has its own model. A lane shows a recording or a live server on this
// machine; live lanes scroll.
"use strict";
(function () {
  const EB = globalThis.EB;
  const $ = (id) => document.getElementById(id);
  const WINDOW = 8; // seconds of a live lane
  const SHOWN_FOR = 14; // approximate seconds that a race of recordings lasts
  const DEMO = ["nobatch", "static", "dynamic"].map((policy) => `web/demo/${policy}.jsonl`);

  const readsFiles = Boolean($("files")); // the lab has runs of its own

  let races = new Map(); // runs by load
  let lanes = [];
  let fitted = ""; // the size of the window that the lanes were made for
  let clock = 0, length = 1, speed = 1, playing = true, dirty = true;

  // Show the runs of the first load and offer the others; a run gets its lane when it is shown.
  function show(runs) {
    races = new Map();
    for (const run of runs) races.set(run.load, [...(races.get(run.load) ?? []), run]);
    for (const control of document.querySelectorAll(".recorded")) control.hidden = false;
    $("loads").hidden = races.size < 2;
    $("load").replaceChildren(...[...races.keys()].map((load) => new Option(load || "unnamed", load)));
    begin(races.keys().next().value);
  }

  function begin(load) {
    for (const lane of lanes) {
      lane.feed?.stop();
      lane.box.remove();
    }
    const runs = races.get(load);
    const numbers = EB.numbersOf(runs);
    lanes = runs.map((run) => {
      const first = Math.min(run.records[0].t, ...run.arrivals.map((arrival) => arrival.t));
      return Object.assign(new EB.Lane($("lanes"), run.name, EB.modelOf(run, numbers), first), { cut: run.cut });
    });
    EB.put("hue", numbers ? "a number is a request, the same in every lane; colors repeat" : "a number is a request of its lane; colors repeat");
    EB.levelLanes(lanes);
    length = Math.max(0.01, ...lanes.map((lane) => (lane.prepare(), lane.seconds)));
    const wanted = length / SHOWN_FOR;
    const options = [...$("speed").options].map((option) => Number(option.value));
    speed = options.reduce((best, option) =>
      Math.abs(Math.log(option / wanted)) < Math.abs(Math.log(best / wanted)) ? option : best, 1);
    $("speed").value = String(speed);
    $("seek").max = String(length);
    clock = 0;
    EB.put("lead", lead());
    fitted = "";
    play(true);
  }

  // Give the lanes the height that the window leaves them. The frame of a report is as high as its content instead.
  function fitLanes() {
    const size = [innerWidth, innerHeight, ...lanes.map((lane) => lane.model.slots)].join();
    if (size === fitted || !lanes.length || frameElement || !readsFiles) return;
    fitted = size;
    const heights = lanes.reduce((sum, lane) => sum + lane.canvas.clientHeight, 0);
    const others = $("lanes").getBoundingClientRect().bottom + scrollY - heights;
    for (const lane of lanes) lane.fit((innerHeight - others) / lanes.length);
    dirty = true;
  }

  // Say what the lanes have in common, as far as the records show, and how long each took.
  function lead() {
    if (lanes.length < 2) return "";
    const { cut } = lanes[0];
    if (cut) return `The first ${EB.seconds(cut)} of each run.`;
    const requests = lanes.map((lane) => [...lane.model.requests.values()]);
    const agree = (value) => new Set(requests.map((all) => all.map(value).sort().join())).size === 1;
    if (!agree(({ total }) => total)) {
      const counts = lanes.map((lane) => `${lane.total} in ${lane.badge.textContent}`).join(", ");
      return `The lanes served different requests (${counts}), so their times cannot be compared.`;
    }
    const same = agree(({ id, total }) => `${id} ${total}`);
    const held = lanes.some((lane) => lane.sums[lane.sums.length - 1].steps[EB.STEPS.indexOf("held")] > 0);
    const ordered = [...lanes].sort((a, b) => b.seconds - a.seconds);
    const times = ordered.map((lane, k) => `${lane.badge.textContent} ${k ? "" : "took "}${EB.seconds(lane.seconds)}`);
    const { total } = lanes[0];
    return (same ? `Each lane serves the same ${total} requests. ` : `Each lane serves ${total} requests of the same lengths. `)
      + (held ? "Hatched slots are finished and wait for the longest request of their batch. " : "")
      + `${times.join(", ")}.`;
  }

  function runsOf(file, text) {
    const runs = EB.parseRuns(text);
    if (!runs.length) throw new Error(`${file} contains no step records. Choose an iterations.jsonl file`);
    return runs.map((run) => ({ ...run, name: run.name || file.replace(/\.[a-z]+$/, "") }));
  }

  function race(names, texts) {
    show(texts.flatMap((text, k) => runsOf(names[k], text)));
  }

  function laneOfServer(url) {
    const model = new EB.Model();
    const lane = new EB.Lane($("lanes"), url, model, 0);
    lane.live = true;
    lane.feed = new EB.Feed(url.replace(/\/$/, ""), {
      state(state, fresh) {
        if (fresh) model.clear();
        lane.offset = state.now - performance.now() / 1000;
        model.connected(state);
        EB.put(lane.badge, state.policy);
      },
      step: (record) => model.add(record),
      policy: (change) => EB.put(lane.badge, change.policy),
      arrival: (arrival) => model.arrival(arrival),
      departure: (departure) => model.departure(departure),
      gap: () => model.gap(),
      status: (name, text) => (lane.problem = text),
    }, { crossOrigin: new URL(url, location).origin !== location.origin });
    return lane;
  }

  async function open(urls) {
    try {
      if (urls.some((url) => !/\.(jsonl|json|txt)$/.test(url))) {
        for (const lane of lanes) lane.box.remove();
        lanes = urls.map(laneOfServer);
        for (const control of document.querySelectorAll(".recorded")) control.hidden = true; // live lanes cannot be paused or moved
        EB.put("lead", "Live servers, side by side. Send them the same load.");
        return;
      }
      const texts = await Promise.all(urls.map(async (url) => {
        const answer = await fetch(url);
        if (!answer.ok) throw new Error(`cannot read ${url}: HTTP ${answer.status}`);
        return answer.text();
      }));
      if (!races.size) race(urls.map((url) => url.split("/").pop()), texts); // unless files were opened meanwhile
    } catch (error) {
      showError(error);
    }
  }

  // Show the compressed runs that a report contains.
  async function openRecorded(text) {
    const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const loads = await new Response(plain).json();
    show(loads.flatMap(({ load, cut, runs, arrivals = [] }) =>
      Object.entries(runs).map(([name, records]) => ({ load, cut, name, records, arrivals, departures: [] }))));
    const fit = () => (frameElement.style.height = `${document.body.scrollHeight + 2}px`);
    if (frameElement) new ResizeObserver(fit).observe(document.body);
  }

  async function openFiles(files) {
    try {
      const texts = await Promise.all([...files].map((file) => file.text()));
      $("banner").hidden = true;
      race([...files].map((file) => file.name), texts);
    } catch (error) {
      showError(error);
    }
  }

  function showError(error) {
    $("banner").hidden = false;
    EB.put("banner", `${error.message}.`);
  }

  function play(on) {
    if (on && clock >= length) clock = 0;
    playing = on;
    dirty = true;
    EB.put("pause", on ? "Pause" : "Resume");
  }

  let before = performance.now(), drawn = "";

  function frame(now) {
    requestAnimationFrame(frame);
    const elapsed = Math.min(0.25, (now - before) / 1000);
    before = now;
    fitLanes();
    if (lanes.some((lane) => lane.live)) {
      if (playing) drawLive(now);
      return;
    }
    if (playing && lanes.length) {
      clock = Math.min(length, clock + elapsed * speed);
      if (clock >= length) play(false);
    }
    const stamp = [clock, lanes.length, innerWidth].join();
    if (stamp === drawn && !dirty) return;
    drawn = stamp;
    dirty = false;
    for (const lane of lanes) lane.draw(clock, length * 1.02);
    if (document.activeElement !== $("seek")) $("seek").value = String(clock);
    EB.put("clock", EB.seconds(clock));
  }

  function drawLive(now) {
    for (const lane of lanes) {
      EB.put(lane.end, lane.problem || (lane.model.columns.length ? "" : "no requests yet"));
      if (!lane.model.columns.length) continue;
      const at = now / 1000 + lane.offset;
      lane.origin = lane.model.columns[0].t;
      lane.picture.draw(lane.model, {
        index: lane.model.columns.length - 1, time: lane.scale(WINDOW), at, origin: lane.origin,
      });
      if (now - (lane.refreshed ?? 0) < 300) continue;
      lane.refreshed = now;
      const tiles = lane.model.tiles(lane.model.columns.length - 1, 10, at);
      EB.put(lane.texts["tokens/s"], EB.figure(tiles.tokensPerSecond));
      EB.put(lane.texts.waiting, EB.count(tiles.waiting));
      EB.put(lane.texts.answered, EB.count(lane.model.columns.reduce((sum, column) => sum + column.finished, 0)));
      EB.put(lane.texts["mean latency"], EB.seconds(EB.latencyAt(lane.model, at)));
      if (tiles.waste) lane.showWaste(tiles.waste);
    }
  }

  function step(by) {
    play(false);
    const moments = lanes.flatMap((lane) => lane.model.columns.map((column) => column.t - lane.origin + 1e-9));
    const next = moments.filter((moment) => (by > 0 ? moment > clock + 1e-8 : moment < clock - 1e-8));
    if (next.length) clock = by > 0 ? Math.min(...next) : Math.max(...next);
    else clock = by > 0 ? length : 0;
    dirty = true;
  }

  $("pause").addEventListener("click", () => play(!playing));
  $("again").addEventListener("click", () => {
    clock = 0;
    play(true);
  });
  $("back").addEventListener("click", () => step(-1));
  $("forward").addEventListener("click", () => step(1));
  $("load").addEventListener("change", () => begin($("load").value));
  $("speed").addEventListener("change", () => (speed = Number($("speed").value)));
  $("seek").addEventListener("input", () => {
    play(false);
    clock = Number($("seek").value);
  });
  $("files")?.addEventListener("change", () => openFiles($("files").files));
  EB.onTheme(() => {
    for (const lane of lanes) lane.picture.restyle();
    dirty = true;
  });
  document.addEventListener("keydown", (event) => {
    // A button that was just pressed has the focus: arrows do nothing to it, so they still step.
    const taken = event.key.startsWith("Arrow") ? "input, select, textarea" : "input, select, textarea, button, a";
    if (event.target.closest(taken) || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { " ": () => play(!playing), ArrowLeft: () => step(-1), ArrowRight: () => step(1) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  if ($("drop")) EB.onDrop(openFiles);

  const runs = new URLSearchParams(location.search).getAll("run");
  if ($("recorded")) openRecorded($("recorded").textContent);
  else if (readsFiles) open(runs.length ? runs : DEMO);
  requestAnimationFrame(frame);
  EB.race = { show, get playing() { return playing; }, get lanes() { return lanes; }, get clock() { return clock; }, set clock(t) { play(false); clock = Math.min(t, length); dirty = true; } };
})();
