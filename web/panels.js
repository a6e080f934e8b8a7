// What the pages share: tiles, the waste bar, the table of requests, the theme button, and dropped files.
// Users' text is only ever set as text, never as HTML.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { count, counted, seconds, percent, figure } = EB;
  const $ = (id) => document.getElementById(id);
  const WASTE = EB.STEPS;
  const STATES = { prefill: "▮ prefill", decode: "▶ decode", held: "▨ held", paused: "‖ paused", waiting: "… waiting",
    preempted: "↺ preempted" };

  const ENDS = { length: "✓ done", stop: "✓ done, by itself" };

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

  // One line that reads as an error; an empty text hides it.
  function showError(id, text) {
    put(id, text);
    $(id).hidden = !text;
  }

  // Copy the text of an element, or another one in its place. Where a browser forbids that, as on a page without
  // encryption, the element is selected instead.
  async function copy(button, source, text = source.textContent) {
    try {
      await navigator.clipboard.writeText(text);
      put(button, "Copied");
    } catch {
      getSelection().selectAllChildren(source);
      put(button, "Selected: press Ctrl+C");
    }
    setTimeout(() => put(button, "Copy"), 2000);
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
  function wastedRows(waste) {
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
    put("t-running", count(tiles?.running ?? 0));
    const slots = tiles?.slots ?? facts.slots;
    put("t-slots", slots ? `of ${count(slots)} slots` : "");
    put("t-waiting", count(waiting));
    put("t-waiting-sub", facts.maxQueue ? `limit ${count(facts.maxQueue)}` : "in the queue");
    put("t-tokens", tiles ? figure(tiles.tokensPerSecond) : "0");
    put("t-step", tiles && tiles.stepSeconds ? `${seconds(tiles.stepSeconds)} per step` : "idle");
    put("t-fill", tiles && tiles.steps ? percent(tiles.fill) : "–");
    const wasted = wastedRows(tiles?.waste);
    put("t-fill-sub", wasted === null ? "of the slots" : `${percent(wasted)} wasted rows`);
    put("t-ttft", seconds(tiles?.ttft50));
    put("t-ttft99", tiles?.ttft99 != null ? `p99 ${seconds(tiles.ttft99)}` : "to the first token");
    put("t-itl", seconds(tiles?.itl50));
    if (tiles?.drafted) $("drafts").hidden = false; // it stays, so that nothing below it jumps
    if (!tiles?.drafted) put("t-drafts", "no draft tokens in the last ten seconds");
    else {
      put("t-drafts", `${tiles.tokensPerStep.toFixed(2)} tokens per request and step, `
        + `${percent(tiles.acceptance)} of ${count(tiles.drafted)} draft tokens accepted`);
    }
    put("t-itl99", tiles?.itl99 != null ? `p99 ${seconds(tiles.itl99)}` : "between tokens");
    put("waste-span", tiles && tiles.steps ? `last ${count(tiles.steps)} steps` : "");
    const total = tiles ? tiles.pages.total : facts.pages || 0;
    const used = tiles?.running ? tiles.pages.used : 0; // the last step was recorded before its pages were freed
    put("t-pages", total ? `${count(used)} of ${count(total)}` : "none");
    $("pages").style.transform = `scaleX(${total ? used / total : 0})`;
  }

  const NAMED = 8; // requests of an area that are named
  // The table of requests. A row keeps its element while its request is shown, so that keyboard focus stays.
  class Requests {
    // choose(number) is called when a request is clicked, point(number) when the pointer enters its row, or leaves it: 0.
    constructor(body, choose, point) {
      this.body = body;
      this.choose = choose;
      this.point = point;
      this.rows = new Map();
    }

    // marks: the numbers of the chosen request and of the one pointed at in the picture, and the id of this page's own.
    show({ running, waiting, left, waitingCount }, at, marks) {
      const listed = [...running, ...waiting.slice(0, 30), ...left.slice(0, 30)];
      const kept = new Set();
      let place = this.body.firstElementChild;
      for (const entry of listed) {
        const { number } = entry.request;
        kept.add(number);
        let row = this.rows.get(number);
        if (!row) this.rows.set(number, (row = this.make(entry.request)));
        this.fill(row, entry, at, marks);
        if (row.element !== place) this.body.insertBefore(row.element, place);
        else place = place.nextElementSibling;
      }
      for (const [number, row] of this.rows) {
        if (kept.has(number)) continue;
        if (row.element.matches(":hover")) this.point(0);
        row.element.remove();
        this.rows.delete(number);
      }
      const more = waitingCount - Math.min(waitingCount, 30);
      put("rows-more", more ? `and ${count(more)} more waiting` : listed.length ? "" : "None yet.");
    }

    make(request) {
      const row = { element: element("tr"), cells: [] };
      const button = element("button", "who");
      button.type = "button";
      button.append(element("i"), element("b", "", `#${request.number}`), element("code", "", short(request.id)));
      row.element.addEventListener("click", () => this.choose(request.number));
      row.element.addEventListener("pointerenter", () => this.point(request.number));
      row.element.addEventListener("pointerleave", () => this.point(0));
      const first = row.element.appendChild(element("td"));
      first.append(button);
      row.mark = button.firstChild;
      row.own = first.appendChild(element("span", "yours", "yours"));
      row.text = first.appendChild(element("span", "text-of"));
      for (let k = 0; k < 5; k++) row.cells.push(row.element.appendChild(element("td")));
      const progress = row.cells[2].appendChild(element("div", "progress"));
      row.bar = progress.appendChild(element("span")).appendChild(element("b"));
      row.count = progress.appendChild(element("small", "", ""));
      return row;
    }

    fill(row, { request, slot, state, done }, at, { chosen, pointed, own }) {
      row.element.classList.toggle("chosen", request.number === chosen);
      row.element.classList.toggle("pointed", request.number === pointed);
      row.own.hidden = request.id !== own;
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
        ? request.max ? `0/${count(request.max)}` : `${count(done)}/${count(total)}`
        : `${count(Math.min(output, request.max))}/${count(request.max)}`);
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

  // Describe a cell in words.
  function describe(model, hit) {
    const column = model.columns[hit.index];
    const rows = column.slots - Math.round(column.steps[3]);
    const step = `iteration ${count(column.n)}: ${seconds(column.seconds)}, ${rows} of ${column.slots} slots, `
      + `${count(column.tokens)} tokens computed, ${count(column.queue)} waiting`
      + (column.masks ? `, token masks: ${seconds(column.masks)} of this step` : "")
      + (column.experts ? `, ${count(column.experts.read)} of ${count(column.experts.of)} experts read` : "");
    if (hit.slot < 0 || hit.slot >= column.slots) return step;
    const request = model.requests.get(column.who[hit.slot]);
    const kind = EB.NAMES[column.kind(hit.slot)];
    if (!column.who[hit.slot]) return `slot ${hit.slot}: idle · ${step}`;
    const words = [`slot ${hit.slot}: #${column.who[hit.slot]} ${kind}`];
    if (request) words.push(`${count(column.done[hit.slot])} of ${count(request.total)} tokens computed`);
    if (column.part(hit.slot)) words.push(`${Math.round(column.part(hit.slot) * 100)} % of the row is padding`);
    if (column.has(hit.slot, EB.HIT) && request) words.push(`${count(request.hit)} tokens from the prefix cache`);
    if (column.has(hit.slot, EB.JOINED)) words.push("joins");
    if (column.has(hit.slot, EB.LEFT)) words.push("leaves");
    return `${words.join(", ")} · ${step}`;
  }

  // Sum up the cells of an area: the columns from..to and the slots top..bottom.
  function sumUp(model, { from, to, top, bottom }) {
    const kinds = EB.NAMES.map(() => 0), who = new Set();
    let tokens = 0;
    for (let i = from; i <= to; i++) {
      const column = model.columns[i], before = model.columns[i - 1];
      for (let slot = top; slot <= Math.min(bottom, column.slots - 1); slot++) {
        const kind = column.kind(slot), number = column.who[slot];
        kinds[kind]++;
        if (!number) continue;
        who.add(number);
        const cached = column.has(slot, EB.HIT) ? model.requests.get(number)?.hit ?? 0 : 0;
        if (kind !== EB.KIND.HELD) tokens += column.done[slot] - (before?.who[slot] === number ? before.done[slot] : cached);
      }
    }
    const first = model.columns[from], last = model.columns[to];
    const cells = EB.NAMES.map((name, k) => kinds[k] && `${count(kinds[k])} ${name}`).filter(Boolean).join(", ");
    const named = [...who].slice(0, NAMED).map((number) => `#${number}`).join(" ");
    return `iterations ${count(first.n)} to ${count(last.n)} (${seconds(last.end - first.t)}), slots ${top} to ${bottom}: rows ${cells}; `
      + `${counted(tokens, "token")} computed for ${counted(who.size, "request")}${named && `: ${named}`}${who.size > NAMED ? " …" : ""}`;
  }

  // Let the theme button switch between light and dark; `repaint` follows with what is drawn, also when the system changes.
  function onTheme(repaint) {
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
    copy, onDrop, onTheme, element, put, showError, wastedRows, WasteBar, rounded, showTiles, Requests, describe, sumUp,
  });
})(globalThis);
