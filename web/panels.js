// What the pages share: tiles, the waste bar, the table of requests, the details of one request, and dropped files.
// Users' text is only ever set as text, never as HTML.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const $ = (id) => document.getElementById(id);
  const REASONS = {
    slots_full: "all slots were taken",
    token_budget: "other requests used up the step's token budget",
    kv_full: "no KV pages were free",
    policy_order: "the policy made it wait: for its turn, or for the batch to end",
    window: "the policy waited for more requests",
  };
  const WASTE = ["useful", "padding", "held", "idle", "recomputed"];
  const STATES = { prefill: "▮ prefill", decode: "▶ decode", held: "▨ held", paused: "‖ paused", waiting: "… waiting",
    preempted: "↺ preempted" };

  const ENDS = { length: "✓ done", stop: "✓ done, by itself" };

  // Format seconds with three digits and a unit.
  function seconds(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value >= 100) return `${value.toFixed(0)} s`;
    if (value >= 10) return `${value.toFixed(1)} s`;
    if (value >= 1) return `${value.toFixed(2)} s`;
    if (value >= 0.01) return `${(value * 1000).toFixed(0)} ms`;
    return `${(value * 1000).toFixed(1)} ms`;
  }

  function element(tag, name, text) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function put(id, text) {
    const at = typeof id === "string" ? $(id) : id;
    if (at.textContent !== text) at.textContent = text;
  }

  // A stacked bar of the five kinds with its legend; the shares in `waste` sum to 1.
  class WasteBar {
    constructor(bar, legend) {
      this.bar = bar;
      this.parts = {};
      this.texts = {};
      for (const name of WASTE) {
        this.parts[name] = bar.appendChild(element("div", `w-${name}`));
        if (!legend) continue;
        const item = legend.appendChild(element("li"));
        item.appendChild(element("span", `w-${name}`));
        this.texts[name] = item.appendChild(element("b", "", "–"));
        item.appendChild(document.createTextNode(name));
      }
    }

    show(waste) {
      const shares = rounded(waste);
      const words = [];
      for (const name of WASTE) {
        this.parts[name].style.flexGrow = waste ? waste[name] : 0;
        if (this.texts[name]) put(this.texts[name], waste ? `${shares[name]} %` : "–");
        words.push(`${name} ${waste ? shares[name] : 0} %`);
      }
      const label = waste ? `Slot-steps: ${words.join(", ")}` : "No recent steps";
      if (this.bar.getAttribute("aria-label") !== label) this.bar.setAttribute("aria-label", label);
    }
  }

  // The share of the rows that were computed without a new token; null without rows.
  function inVain(waste) {
    const rows = waste ? 1 - waste.idle : 0;
    return rows > 1e-9 ? 1 - waste.useful / rows : null;
  }

  // Integer percentages that sum to 100: the largest remainders are rounded up.
  function rounded(waste) {
    if (!waste) return {};
    const exact = WASTE.map((name) => waste[name] * 100);
    const result = exact.map(Math.floor);
    const order = WASTE.map((_, k) => k).sort((a, b) => (exact[b] % 1) - (exact[a] % 1));
    const missing = Math.round(100 - result.reduce((sum, share) => sum + share, 0));
    for (let k = 0; k < missing; k++) result[order[k % order.length]]++;
    return Object.fromEntries(WASTE.map((name, k) => [name, result[k]]));
  }

  function showTiles(tiles, waiting, facts) {
    put("t-running", tiles ? String(tiles.running) : "0");
    const slots = tiles?.slots ?? facts.slots;
    put("t-slots", slots ? `of ${slots} slots` : "");
    put("t-waiting", String(waiting));
    put("t-waiting-sub", facts.maxQueue ? `limit ${facts.maxQueue.toLocaleString("en")}` : "in the queue");
    put("t-tokens", tiles ? figure(tiles.tokensPerSecond) : "0");
    put("t-step", tiles && tiles.stepSeconds ? `${seconds(tiles.stepSeconds)} per step` : "idle");
    put("t-fill", tiles && tiles.steps ? percent(tiles.fill) : "–");
    const vain = inVain(tiles?.waste);
    put("t-fill-sub", vain === null ? "of the slots" : `${percent(vain)} of rows in vain`);
    put("t-ttft", seconds(tiles?.ttft50));
    put("t-ttft99", tiles?.ttft99 != null ? `p99 ${seconds(tiles.ttft99)}` : "to the first token");
    put("t-itl", seconds(tiles?.itl50));
    put("t-itl99", tiles?.itl99 != null ? `p99 ${seconds(tiles.itl99)}` : "between tokens");
    put("waste-span", tiles && tiles.steps ? `last ${tiles.steps.toLocaleString("en")} steps` : "");
    const total = tiles ? tiles.pages.total : facts.pages || 0;
    const used = tiles?.running ? tiles.pages.used : 0; // the last step was recorded before its pages were freed
    put("t-pages", total ? `${used.toLocaleString("en")} of ${total.toLocaleString("en")}` : "none");
    $("pages").style.transform = `scaleX(${total ? used / total : 0})`;
  }

  const FAR_OFF = 0.25;
  const FIGURES = [["latency-p50", "p50"], ["latency-p99", "p99"], ["latency-per-token", "per token"]];

  // Show how another policy would have served the same requests, next to the active policy, measured and simulated.
  function showShadow(report) {
    $("shadow").hidden = !report;
    if (!report) return;
    const ready = report.state === "ready";
    put("shadow-policy", report.policy);
    put("shadow-other", report.policy);
    $("shadow-table").hidden = !ready;
    put("shadow-span", ready ? `last ${report.requests.toLocaleString("en")} requests` : "");
    put("shadow-says", ready ? verdict(report) : report.reason || "The simulation starts after ten finished requests.");
    put("shadow-basis", ready ? basis(report) : "");
    if (!ready) return;
    $("shadow-rows").replaceChildren(...FIGURES.map(([name, text]) => {
      const row = element("tr");
      const values = [report.real, report["served-simulated"], report].map((of) => seconds(of[name]));
      row.append(element("th", "", text), ...values.map((value) => element("td", "", value)));
      row.firstChild.scope = "row";
      return row;
    }));
  }

  function verdict({ policy, served, real, "served-simulated": simulated, ...other }) {
    const [would, measured, predicted] = [other, real, simulated].map((of) => seconds(of["latency-p99"]));
    if (Math.abs(other.error["latency-p99"]) > FAR_OFF) {
      return `Simulated p99: ${would} with ${policy}, ${predicted} with ${served}. Measured with ${served}: ${measured}. `
        + "The simulator is far off, so compare only the two simulated values.";
    }
    return `Estimated p99 with ${policy}: ${would}. Measured with ${served}: ${measured} (simulated: ${predicted}).`;
  }

  function basis({ cost, error, extrapolates, from_idle }) {
    const off = Math.round(100 * Math.abs(error["latency-p99"]));
    const words = [`The simulator is ${off} % off for the active policy; its costs come from ${cost.from}`];
    if (extrapolates) words.push("the estimate needs larger steps than any measured here, so it is a guess");
    if (!from_idle) words.push("the server was busy when these requests began, the simulation starts idle");
    return `${words.join("; ")}.`;
  }

  function percent(share) {
    return `${Math.round(share * 100)} %`;
  }

  function figure(value) {
    return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(value ? 1 : 0);
  }

  // The table of requests. A row keeps its element while its request is shown, so that keyboard focus stays.
  class Requests {
    constructor(body, choose) {
      this.body = body;
      this.choose = choose;
      this.rows = new Map();
    }

    show({ running, waiting, left, waitingCount }, at, chosen) {
      const listed = [...running, ...waiting.slice(0, 30), ...left.slice(0, 30)];
      const kept = new Set();
      let place = this.body.firstElementChild;
      for (const entry of listed) {
        const { number } = entry.request;
        kept.add(number);
        let row = this.rows.get(number);
        if (!row) this.rows.set(number, (row = this.make(entry.request)));
        this.fill(row, entry, at, number === chosen);
        if (row.element !== place) this.body.insertBefore(row.element, place);
        else place = place.nextElementSibling;
      }
      for (const [number, row] of this.rows) {
        if (kept.has(number)) continue;
        row.element.remove();
        this.rows.delete(number);
      }
      const more = waitingCount - Math.min(waitingCount, 30);
      put("rows-more", more ? `and ${more} more waiting` : listed.length ? "" : "None yet.");
    }

    make(request) {
      const row = { element: element("tr"), cells: [] };
      const button = element("button", "who");
      button.type = "button";
      button.append(element("i"), element("b", "", `#${request.number}`), element("code", "", short(request.id)));
      button.addEventListener("click", () => this.choose(request.number));
      const first = row.element.appendChild(element("td"));
      first.append(button);
      row.mark = button.firstChild;
      row.text = first.appendChild(element("span", "text-of"));
      for (let k = 0; k < 5; k++) row.cells.push(row.element.appendChild(element("td")));
      const progress = row.cells[2].appendChild(element("div", "progress"));
      row.bar = progress.appendChild(element("span")).appendChild(element("b"));
      row.count = progress.appendChild(element("small", "", ""));
      return row;
    }

    fill(row, { request, slot, state, done }, at, chosen) {
      row.element.classList.toggle("chosen", chosen);
      if (request.hue >= 0) row.mark.style.background = EB.PALETTE[request.hue];
      if (request.text) put(row.text, request.text.slice(0, 80));
      const complete = state === "finished" && ENDS[request.reason];
      put(row.cells[0], state === "finished" ? complete || `✕ ${request.reason || "gone"}` : STATES[state]);
      put(row.cells[1], slot >= 0 ? String(slot) : "");
      const total = request.total || 0;
      // The last token of an answer is not computed, and an answer may end before its limit.
      row.bar.style.transform = `scaleX(${complete ? 1 : total ? Math.min(1, done / total) : 0})`;
      const output = request.prompt === null ? null : Math.max(0, done - request.prompt + 1);
      put(row.count, output === null || !request.joinedAt
        ? request.max ? `0/${request.max}` : `${done}/${total}`
        : `${Math.min(output, request.max)}/${request.max}`);
      const waited = request.arrived === null ? null
        : (state === "waiting" ? at : request.joined ?? request.left ?? at ?? request.arrived) - request.arrived;
      put(row.cells[3], waited === null ? "" : seconds(Math.max(0, waited)));
      const end = state === "finished" ? request.left : at;
      put(row.cells[4], request.arrived === null || !end ? "" : seconds(Math.max(0, end - request.arrived)));
    }
  }

  function short(id) {
    return id.length > 12 ? `${id.slice(0, 8)}…` : id;
  }

  // Show the details of one request: the server's record of it or, in a replay, what the step records contain.
  function showDetail(box, request, record, problem, close, at) {
    box.hidden = !request;
    box.replaceChildren();
    if (!request) return;
    const title = element("h3", "", `Request #${request.number} `);
    title.append(element("code", "", request.id));
    const shut = element("button", "close", "Close");
    shut.type = "button";
    shut.addEventListener("click", close);
    box.append(title, shut);
    if (request.text) box.append(element("p", "", `“${request.text}”`));
    const choice = record?.choices?.[0] ?? record;
    let parts = choice ? partsOf(choice) : partsOfRecords(request);
    if (!parts.length && request.arrived !== null && at > request.arrived) {
      parts = [["waited", "waiting so far", at - request.arrived]];
    }
    box.append(timeline(parts));
    box.append(element("p", "", sentence(request, choice)));
    if (problem) box.append(element("p", "", problem));
    const waits = choice?.waited ?? [];
    if (waits.length) {
      const table = element("table");
      const head = table.appendChild(element("tr"));
      for (const text of ["waiting reason", "iterations", "time"]) head.append(element("th", "", text));
      for (const { reason, iterations, seconds: time } of waits) {
        const row = table.appendChild(element("tr"));
        row.append(
          element("td", "text", `${reason}: ${REASONS[reason] || ""}`),
          element("td", "", String(iterations)),
          element("td", "", seconds(time)),
        );
      }
      box.append(table);
    }
  }

  function partsOf(record) {
    const parts = (record.waited || []).map((w) => ["waited", w.reason, w.seconds]);
    const { arrived_at: came, scheduled_at: began, first_token_at: first, finished_at: end } = record;
    if (!parts.length && came && began && began - came > 1e-4) parts.push(["waited", "waited", began - came]);
    if (began && (first || end)) parts.push(["prefill", "prefill", (first || end) - began]);
    if (first && end) parts.push(["decode", "decode", end - first]);
    return parts;
  }

  function partsOfRecords({ arrived, joined, first, left, last }) {
    const parts = [];
    if (arrived !== null && joined !== null) parts.push(["waited", "waited", joined - arrived]);
    if (joined !== null && first !== null) parts.push(["prefill", "prefill", first - joined]);
    if (first !== null) parts.push(["decode", "decode", (left ?? last) - first]);
    return parts;
  }

  function timeline(parts) {
    const bar = element("div", "timeline");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", parts.map(([, name, time]) => `${name} ${seconds(time)}`).join(", ") || "still waiting");
    const total = parts.reduce((sum, [, , time]) => sum + time, 0) || 1;
    for (const [kind, name, time] of parts) {
      const part = bar.appendChild(element("div", kind, time / total > 0.12 ? `${name} ${seconds(time)}` : ""));
      part.title = `${name} ${seconds(time)}`;
      part.style.flexGrow = (100 * time) / total;
      part.style.flexBasis = "0";
    }
    return bar;
  }

  function sentence(request, record) {
    if (!record) return request.joinedAt ? `Joined at iteration ${request.joinedAt}.` : "Waiting in the queue.";
    const words = [`${record.prompt_tokens} prompt tokens, ${record.output_tokens} output tokens`];
    if (record.cached_tokens) words.push(`${record.cached_tokens} prompt tokens cached`);
    if (record.iterations) {
      words.push(`iterations ${record.iterations[0]} to ${record.iterations[1]}`);
      words.push(`batch size ${record.batch.mean.toFixed(1)} on average, ${record.batch.max} at most`);
    }
    words.push(record.state === "finished" ? `finished: ${record.finish_reason}` : record.state);
    return `${words.join("; ")}.`;
  }

  // Describe a cell in words.
  function describe(model, hit) {
    const column = model.columns[hit.index];
    const rows = column.slots - Math.round(column.steps[3]);
    const step = `iteration ${column.n}: ${seconds(column.seconds)}, ${rows} of ${column.slots} slots, `
      + `${column.tokens} tokens computed, ${column.queue} waiting`;
    if (hit.slot < 0 || hit.slot >= column.slots) return step;
    const request = model.requests.get(column.who[hit.slot]);
    const kind = EB.NAMES[column.kind(hit.slot)];
    if (!column.who[hit.slot]) return `slot ${hit.slot}: idle · ${step}`;
    const words = [`slot ${hit.slot}: #${column.who[hit.slot]} ${kind}`];
    if (request) words.push(`${column.done[hit.slot]} of ${request.total} tokens computed`);
    if (column.part(hit.slot)) words.push(`${Math.round(column.part(hit.slot) * 100)} % of the row is padding`);
    if (column.has(hit.slot, EB.HIT) && request) words.push(`${request.hit} tokens from the prefix cache`);
    if (column.has(hit.slot, EB.JOINED)) words.push("joins");
    if (column.has(hit.slot, EB.LEFT)) words.push("leaves");
    return `${words.join(", ")} · ${step}`;
  }

  // Call `open` with files dropped anywhere on the page; #drop shows while files are dragged over it.
  function onDrop(open) {
    const shown = (event, is) => {
      event.preventDefault();
      $("drop").hidden = !is;
    };
    document.addEventListener("dragover", (event) => shown(event, true));
    document.addEventListener("dragleave", (event) => event.relatedTarget || shown(event, false));
    document.addEventListener("drop", (event) => {
      shown(event, false);
      if (event.dataTransfer.files.length) open(event.dataTransfer.files);
    });
  }

  Object.assign(EB, {
    onDrop, seconds, element, put, percent, inVain, WasteBar, rounded, showTiles, showShadow, figure, Requests, showDetail,
    describe, short,
  });
})(globalThis);
