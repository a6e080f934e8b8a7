// The lab: a policy in the editor, a race on a named workload with a sentence for each step, the law checker, and links.
// Python answers in the background; this file asks, and shows what comes back only ever as text.
"use strict";
(function () {
  const EB = globalThis.EB;
  const $ = (id) => document.getElementById(id);
  const OWN = "my_policy.py";
  const STORED = "eb-lab-policy";
  const NUMBERS = ["count", "rate", "slots", "seed"];
  const RACERS = [OWN, "dynamic", "static", ""];
  const LANE_HEIGHT = 88; // of the rows of slots
  const CASES = 300, LARGE_CASES = 1; // of the law checker; the command line tries more
  const WORDS = { loading: "Loading Python", ready: "Ready", busy: "Running", failed: "Python could not be loaded" };
  const EXAMPLE = `"""Shortest request first."""

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        return sorted(waiting, key=lambda seq: seq.max_tokens)
`;

  let catalog = { files: {}, workloads: {}, loops: {}, orders: {}, lessons: {} };
  let own = EXAMPLE; // the text of the reader's policy, which may not be the file shown
  let linked = false; // whether it came with a link
  let isOwnShown = false; // whether the race that is shown has the reader's policy
  let closed = new Set(); // loops in which no request joins while others run
  let drawn = "";
  const gamma = new EB.GammaSlider(() => race());

  const editor = new EB.Editor($("text"), $("lines"), () => {
    own = editor.text;
    $("verdict").hidden = true; // of another text
    age(isOwnShown && !$("race").hidden); // the race, too
    if (linked) return; // a stranger's policy does not take the place of the reader's own
    if (location.hash) history.replaceState(null, "", location.pathname); // it carries an older text
    try {
      localStorage.setItem(STORED, own);
    } catch {
      // storage is blocked, so the text lasts only for this page
    }
  });

  const engine = new EB.Engine((state) => {
    $("run").disabled = $("laws").disabled = state !== "ready";
    $("stop").disabled = state !== "busy";
    EB.put("status", WORDS[state]);
  });

  function group(select, label, names, describe = (name) => name, lines = {}) {
    const options = select.appendChild(document.createElement("optgroup"));
    options.label = label;
    options.append(...names.map((name) => Object.assign(new Option(describe(name), name), { title: lines[name.replace("dynamic+", "")] ?? "" })));
  }

  // Fill the menus with what was packed.
  function fill() {
    const within = (folder) => Object.keys(catalog.files).filter((name) => name.startsWith(folder) && !name.slice(folder.length).includes("/"));
    $("file").replaceChildren(new Option(`${OWN} (yours)`, OWN));
    for (const folder of ["policies/", "policies/orders/", "scheduling/"]) group($("file"), folder, within(folder), (name) => name.slice(folder.length));
    $("racers").append(...RACERS.map((chosen, k) => {
      const select = EB.element("select", "racer");
      select.setAttribute("aria-label", `Policy ${k + 1}`);
      select.append(new Option("–", ""), new Option(OWN, OWN));
      group(select, "loops", Object.keys(catalog.loops), undefined, catalog.loops);
      group(select, "orders", Object.keys(catalog.orders).map((order) => `dynamic+${order}`), undefined, catalog.orders);
      select.value = chosen;
      return select;
    }));
    $("workload").append(...Object.keys(catalog.workloads).map((name) => new Option(name, name)));
    group($("lesson"), "the laws, and a score in a lesson", Object.keys(catalog.lessons), (name) => catalog.lessons[name]);
    describeWorkload();
  }

  function describeWorkload() {
    EB.put("about", catalog.workloads[$("workload").value]?.about ?? "");
  }

  function open(name) {
    $("file").value = name;
    editor.show(name === OWN ? own : catalog.files[name], name !== OWN);
    $("copy").hidden = !/^policies\/(orders\/)?[a-z]\w*\.py$/.test(name);
  }

  // The reader's own policy, as this browser keeps it.
  function kept() {
    try {
      return localStorage.getItem(STORED) ?? EXAMPLE;
    } catch {
      return EXAMPLE; // storage is blocked
    }
  }

  // What the controls say, as a link carries it.
  function chosen() {
    const numbers = Object.fromEntries(NUMBERS.map((name) => [name, Number($(name).value)]));
    const racers = [...document.querySelectorAll(".racer")].map((select) => select.value);
    return { text: own, racers, workload: $("workload").value, options: gamma.options, ...numbers };
  }

  function clear() {
    EB.showError("problem", "");
    editor.mark(0);
  }

  // Gray the race out if it is of another text than that in the editor.
  function age(isOlder) {
    $("race").classList.toggle("older", isOlder);
    $("older").hidden = !isOlder;
  }

  function fail({ line, words }) {
    if (line && $("file").value !== OWN) open(OWN);
    EB.showError("problem", line ? `line ${line}: ${words}` : words);
    if (line) editor.mark(line);
    $("problem").scrollIntoView({ block: "nearest" }); // in a narrow window it may be far from the button
  }

  // Ask Python, and return its answer, or null after what went wrong has been shown.
  async function ask(question, how) {
    clear();
    const answer = JSON.parse(await engine.ask(question, how));
    if (answer.error) fail(answer.error);
    return answer.error ? null : answer;
  }

  async function race() {
    if (engine.state !== "ready" || !$("setup").reportValidity()) return;
    const { racers, ...rest } = chosen();
    const policies = racers.filter(Boolean);
    const answer = await ask({ kind: "race", policies, ...rest }, { taints: policies.includes(OWN) });
    const idle = answer?.lanes.find(({ records }) => !records.length);
    if (idle) fail({ line: null, words: `${idle.policy} computed no step: it refused every request` });
    if (answer && !idle) show(answer);
    else $("race").hidden = true; // it is not of this policy
    isOwnShown = policies.includes(OWN);
    age(isOwnShown && !$("race").hidden && own !== rest.text); // the reader may have gone on
    if (JSON.stringify(gamma.options) !== JSON.stringify(rest.options)) await race();
  }

  async function laws() {
    if (engine.state !== "ready") return;
    $("verdict").hidden = true;
    const lesson = $("lesson").value;
    const kind = lesson ? "grade" : "laws";
    const answer = await ask({ kind, lesson, seed: chosen().seed, text: own, cases: CASES, large: LARGE_CASES }, { fresh: true });
    if (!answer) return;
    EB.put("verdict", answer.words);
    $("verdict").className = answer.kept ? "kept" : "broken";
    $("verdict").hidden = false;
    $("verdict").scrollIntoView({ block: "nearest" });
  }

  function show(answer) {
    closed = new Set(answer.lanes.filter((lane) => lane.closed).map((lane) => EB.partsOf(lane.policy).loop));
    $("race").hidden = false;
    EB.race.show(EB.whatIf.runsOf(answer).map((run) => ({ ...run, name: run.policy, load: "" })));
    for (const lane of EB.race.lanes) {
      lane.picture.wanted = Math.max(LANE_HEIGHT, 12 * answer.slots);
      lane.sentences = lane.box.appendChild(EB.element("ol", "sentences"));
      lane.narrator = Object.assign(new EB.Narrator(), { closed });
    }
    tabulate(answer);
    gamma.label.hidden = !answer.lanes.some(({ policy }) => policy === EB.GammaSlider.POLICY);
    drawn = "";
  }

  function tabulate({ lanes, requests }) {
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const columns = {
      policy: ({ policy }) => policy,
      answered: ({ latency }) => `${EB.count(latency.length)} of ${EB.count(requests.length)}`,
      "mean latency": ({ latency }) => EB.seconds(mean(latency)),
      "p99 latency": ({ latency }) => EB.seconds(EB.percentile(latency, 99)),
      "mean time to first token": ({ ttft }) => EB.seconds(mean(ttft)),
      "tokens/s": ({ tokens, makespan }) => EB.figure(tokens / makespan),
      "finished after": ({ makespan }) => EB.seconds(makespan),
      steps: ({ steps }) => EB.count(steps),
    };
    const row = (parent, cells) => parent.appendChild(EB.element("tr")).append(...cells);
    const [head, body] = [EB.element("thead"), EB.element("tbody")];
    row(head, Object.keys(columns).map((name) => Object.assign(EB.element("th", "", name), { scope: "col" })));
    for (const lane of lanes) row(body, Object.values(columns).map((cell) => EB.element("td", "", cell(lane))));
    $("figures").replaceChildren(head, body);
  }

  // Say below each lane what its step did: everything while the race is paused, the most telling while it plays.
  function tell(now) {
    requestAnimationFrame(tell);
    const { lanes, clock, playing } = EB.race;
    const stamp = [clock, playing, lanes.length].join();
    if (stamp === drawn || !lanes[0]?.sentences) return;
    drawn = stamp;
    const spoken = [];
    for (const { model, origin, narrator, sentences, badge } of lanes) {
      const index = model.indexAt(origin + clock);
      const exact = playing ? [] : EB.captionsOf(model, index, closed);
      const captions = exact.length ? exact : [playing ? narrator.at(model, index, now / 1000) : narrator.calm(model, index)];
      const texts = captions.filter(Boolean).map(({ text }) => text);
      const n = playing ? captions[0]?.n : model.columns[index].n;
      sentences.replaceChildren(...texts.map((text) => EB.element("li", "", n ? `step ${EB.count(n)}: ${text}` : text)));
      spoken.push(`${badge.textContent}: ${texts.join("; ")}`);
    }
    if (!playing) EB.put("said", spoken.join(". "));
  }

  // Go to the next step in which something happened in one of the lanes.
  function toDecision() {
    const { lanes, clock } = EB.race;
    const moments = lanes.map(({ model, origin }) => {
      const next = model.columns.findIndex((column, k) => column.t - origin > clock && EB.captionsOf(model, k, closed).length > 0);
      return next < 0 ? Infinity : model.columns[next].t - origin;
    });
    EB.race.clock = Math.min(...moments) + 1e-9;
  }

  function download() {
    const link = EB.element("a");
    link.href = URL.createObjectURL(new Blob([own], { type: "text/x-python" }));
    link.download = OWN;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async function share() {
    history.replaceState(null, "", await EB.link.pack(chosen()));
    try {
      await navigator.clipboard.writeText(location.href);
      EB.put("status", "The link is in the address bar and on the clipboard");
    } catch {
      EB.put("status", "The link is in the address bar");
    }
  }

  // Show what a link carries: a race, and perhaps a policy. Nothing of it runs before the reader presses a button.
  async function openLink() {
    if (location.hash.length < 2) return;
    try {
      const value = await EB.link.unpack(location.hash);
      const carries = value.text !== undefined;
      if (carries) own = value.text;
      else if (linked) own = kept();
      if (carries || linked) age(isOwnShown && !$("race").hidden);
      if (carries || linked) $("banner").hidden = !carries;
      linked = carries;
      [...document.querySelectorAll(".racer")].forEach((select, k) => (select.value = value.racers[k] ?? ""));
      for (const name of NUMBERS) if (Number.isFinite(value[name])) $(name).value = String(value[name]);
      gamma.set(value.options?.[EB.GammaSlider.POLICY]?.gamma ?? 0);
      $("workload").value = value.workload;
      describeWorkload();
      open(OWN);
      if (carries) EB.put("banner", "This policy came with a link. Read it before you run it: it is the code of whoever made the link. It runs apart from this page and without a network.");
    } catch (error) {
      EB.put("banner", error.message);
      $("banner").hidden = false;
    }
  }

  async function begin() {
    try {
      const reply = await fetch("catalog.json");
      if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
      catalog = await reply.json();
    } catch (error) {
      EB.put("banner", `Cannot read catalog.json (${error.message}). Build the lab again with dev/tools/build_lab.sh`);
      $("banner").hidden = false;
    }
    fill();
    own = kept();
    open(OWN);
    await openLink();
  }

  $("figures").parentElement.after(gamma.label);
  $("file").addEventListener("change", () => open($("file").value));
  $("copy").addEventListener("click", () => {
    own = editor.text;
    open(OWN);
    editor.changed();
  });
  $("save").addEventListener("click", download);
  $("decision").addEventListener("click", toDecision);
  $("share").addEventListener("click", share);
  $("workload").addEventListener("change", () => {
    describeWorkload();
    $("rate").value = String(catalog.workloads[$("workload").value].rate);
  });
  $("setup").addEventListener("submit", (event) => {
    event.preventDefault();
    race();
  });
  $("laws").addEventListener("click", laws);
  $("stop").addEventListener("click", () => engine.stop());
  addEventListener("hashchange", openLink);
  requestAnimationFrame(tell);
  EB.lab = { engine, editor, begun: begin() };
})();
