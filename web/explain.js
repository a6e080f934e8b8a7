// Why one request took as long as it did: its times, why it waited step by step, and which requests were in the batch with it.
// The times are those of the server's record where there is one and otherwise, as in a replay, those of the steps.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { count, counted, seconds, element } = EB;
  const REASONS = {
    slots_full: "all slots were taken",
    token_budget: "other requests used up the step's token budget",
    kv_full: "no KV pages were free",
    policy_order: "the policy made it wait: for its turn, or for the batch to end",
    window: "the policy waited for more requests",
    in_progress: "a step was being computed when it arrived",
    waited: "the recording does not say why",
  };
  const SHORT = { // the same in the bar
    slots_full: "slots taken", token_budget: "token budget", kv_full: "no KV pages", policy_order: "policy",
    window: "for more requests", in_progress: "for a step's end",
  };
  const AT_ONCE = "It did not wait: it joined the first step after its arrival.";
  const ROWS = 12; // of the list of steps, the first and the last
  const NEIGHBORS = 16;

  class Explain {
    // `now()` is the moment shown on the clock of the records, and `epoch()` the wall-clock time at 0 of the live records'
    // clock; headers(more) returns a request's headers with the API key.
    constructor(box, player, { now, epoch, headers }) {
      this.box = box;
      this.player = player;
      this.now = now;
      this.epoch = epoch;
      this.headers = headers;
      this.chosen = 0; // the number of the request; 0 is none
      this.forget();
    }

    forget() {
      this.record = null;
      this.problem = "";
      this.of = 0;
      this.at = 0;
      this.drawn = "";
    }

    // Explain a request, or stop explaining it.
    choose(number) {
      this.chosen = this.chosen === number ? 0 : number;
      this.forget();
      this.refresh(true);
      if (this.chosen) this.box.scrollIntoView({ block: "nearest" });
    }

    async refresh(force = false) {
      const { chosen, player } = this;
      const request = player.model.requests.get(chosen);
      if (!request) {
        if (!this.box.hidden || force) this.box.hidden = true;
        if (chosen && player.model.columns.length) this.chosen = 0;
        return;
      }
      if (this.of === chosen && performance.now() - this.at < 1000) return;
      if (this.of !== chosen) this.show(request); // show immediately what this page knows
      this.of = chosen;
      this.at = performance.now();
      if (player.isLive && this.record?.state !== "finished" && !(await this.ask(request))) return;
      this.show(request);
    }

    // Ask the server for its record; return whether the request is still the chosen one.
    async ask(request) {
      let record = null, problem = "";
      try {
        const [id, choice] = request.id.split("/");
        const reply = await fetch(`requests/${encodeURIComponent(id)}`, { headers: this.headers({}) });
        if (!reply.ok) throw await EB.refusal(reply);
        record = await reply.json();
        record = record.choices?.[Number(choice) || 0] ?? record;
      } catch (error) {
        record = this.record;
        problem = error.status ? error.message : "the server cannot be reached";
      }
      if (this.chosen !== request.number) return false;
      this.record = record;
      this.problem = problem;
      return true;
    }

    // All that is known of the request is shown, wherever the cursor is.
    show(request) {
      const { model } = this.player;
      const over = request.left !== null && this.record?.state === "finished";
      const stamp = [request.number, over || model.version, this.record !== null, this.problem].join();
      const waits = request.joined === null && request.left === null;
      if (stamp === this.drawn && !waits) return;
      // Do not take an element away from the keyboard.
      if (this.drawn.startsWith(`${request.number},`) && this.box.querySelector(":focus:not(.close)")) return;
      this.drawn = stamp;
      // The page may have been opened after the arrival.
      const arrived = request.arrived ?? (this.record ? this.record.arrived_at - this.epoch() : null);
      const history = EB.historyOf(model, { ...request, arrived });
      const times = this.record ? timesOfRecord(this.record) : timesOf(request);
      const close = this.box.querySelector(".close") ?? button("close", "Close");
      close.onclick = () => this.choose(this.chosen);
      const focused = close === document.activeElement;
      this.box.hidden = false;
      this.box.replaceChildren(
        heading(request, this.finder(request), close), moments(request, times), timeline(partsOf(times, this.record, history, this.now())),
        element("p", "", sentence(request, this.record, history)),
        columns(whyItWaited(this.record, { ...request, arrived }, history), this.neighbors(history)),
      );
      if (this.record?.blame && this.player.isLive) {
        this.box.append(EB.blameAt(this.record.blame.slice(1), model.numbers, this.headers));
      }
      if (this.problem) {
        const problem = element("p", "error", this.problem);
        problem.setAttribute("role", "alert");
        this.box.append(problem);
      }
      if (focused) close.focus();
    }

    // A button that moves the picture to the request.
    finder(request) {
      const { player } = this;
      const find = button("", "Show in the picture");
      find.disabled = !request.joinedAt || request.seen < player.model.columns[0].n;
      if (find.disabled) find.title = request.joinedAt ? "this page no longer has its steps" : "it has not joined a slot yet";
      find.onclick = () => {
        player.play(false);
        player.moveTo(request.leftAt ?? request.seen);
      };
      return find;
    }

    // Who was in the batch with it; a click explains that request.
    neighbors({ neighbors, own }) {
      if (!own) return [];
      const list = element("ul", "neighbors");
      for (const { request, number, together } of neighbors.slice(0, NEIGHBORS)) {
        const who = button("who", "");
        const mark = who.appendChild(element("i"));
        if (request?.hue >= 0) mark.style.background = EB.PALETTE[request.hue];
        who.append(element("b", "", `#${number}`), element("span", "", counted(together, "step")));
        if (request) who.onclick = () => this.choose(number);
        else who.disabled = true;
        list.appendChild(element("li")).append(who);
      }
      const more = neighbors.length - NEIGHBORS;
      if (more > 0) list.append(element("li", "sub", `and ${count(more)} more`));
      if (!neighbors.length) list.append(element("li", "sub", "No other request: it had the batch to itself."));
      return [element("h3", "", "In the batch with it"), list];
    }
  }

  function button(name, text) {
    const result = element("button", name, text);
    result.type = "button";
    return result;
  }

  function columns(...lists) {
    const box = element("div", "split");
    for (const list of lists) {
      if (list.length) box.appendChild(element("div")).append(...list);
    }
    return box;
  }

  function heading(request, ...buttons) {
    const bar = element("div", "bar");
    const title = bar.appendChild(element("h2", "", `Request #${request.number} `));
    title.append(element("code", "", request.id));
    bar.appendChild(element("div", "buttons")).append(...buttons);
    if (request.text) bar.append(element("p", "said", `“${request.text}”`));
    return bar;
  }

  // The moments of a request on one clock; null where it has not come so far.
  function timesOf({ arrived, joined, first, left, reason }) {
    return { arrived, joined, first, left, reason };
  }

  function timesOfRecord({ arrived_at: arrived, scheduled_at: joined, first_token_at: first, finished_at: left, finish_reason: reason }) {
    return { arrived, joined, first, left, reason };
  }

  function moments(request, { arrived, joined, first, left, reason }) {
    const list = element("ol", "moments");
    const from = arrived ?? joined;
    const add = (name, at, detail) => {
      const item = list.appendChild(element("li", at === null ? "ahead" : ""));
      const after = at === null || from === null ? "–" : at === from ? "0 s" : `+${seconds(at - from)}`;
      item.append(element("span", "", name), element("b", "", after), element("small", "", at === null ? "" : detail));
    };
    add("arrived", arrived, request.prompt === null ? "" : counted(request.prompt, "prompt token"));
    add("joined", joined, request.joinedAt ? `iteration ${count(request.joinedAt)}, slot ${request.slot}` : "");
    add("first token", first, "");
    add("left", left, reason ?? "");
    return list;
  }

  // The parts of the bar: [kind, name, seconds].
  function partsOf({ arrived, joined, first, left }, record, { held, waits }, now) {
    if (!record && arrived !== null && joined === null) return [["waited", "waiting so far", Math.max(0, (left ?? now) - arrived)]];
    // The server counts the step in progress at the arrival under policy_order. Reasons are in the order of their first step.
    const order = waits.map(({ reason }) => (reason === "in_progress" ? "policy_order" : reason));
    const totals = [...(record?.waited ?? [])].sort((a, b) => order.indexOf(a.reason) - order.indexOf(b.reason));
    const parts = totals.map((wait) => ["waited", `waited: ${SHORT[seenAs(wait, waits)] ?? wait.reason}`, wait.seconds]);
    if (!parts.length && arrived !== null && joined !== null) parts.push(["waited", "waited", joined - arrived]);
    if (joined !== null && (first ?? left) !== null) parts.push(["prefill", "prefill", (first ?? left) - joined]);
    if (first !== null && left !== null) {
      parts.push(["decode", "decode", Math.max(0, left - first - held)]);
      if (held) parts.push(["held", "held", held]);
    }
    return parts.filter(([, , time]) => time > 0);
  }

  function timeline(parts) {
    const bar = element("div", "timeline");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", parts.map(([, name, time]) => `${name} ${seconds(time)}`).join(", ") || "it has just arrived");
    const total = parts.reduce((sum, [, , time]) => sum + time, 0) || 1;
    for (const [kind, name, time] of parts) {
      const part = bar.appendChild(element("div", kind));
      if (time / total > 0.12) part.append(element("span", "", `${name} ${seconds(time)}`));
      part.title = `${name} ${seconds(time)}`;
      part.style.flexGrow = (100 * time) / total;
      part.style.flexBasis = "0";
    }
    return bar;
  }

  function sentence(request, record, { own, steps, before }) {
    const words = [];
    if (record) {
      words.push(`${counted(record.prompt_tokens, "prompt token")}, ${counted(record.output_tokens, "output token")}`);
      if (record.cached_tokens) words.push(`${counted(record.cached_tokens, "prompt token")} from the prefix cache`);
      if (record.program) {
        const { name, depth, calls, prompt_tokens, output_tokens } = record.program;
        const tokens = counted(prompt_tokens + output_tokens, "token");
        words.push(`depth ${count(depth)} in program ${name}, whose ${counted(calls, "ended call")} received ${tokens}`);
      }
      if (record.iterations) words.push(`batch size ${record.batch.mean.toFixed(1)} on average, ${count(record.batch.max)} at most`);
    }
    if (own) {
      const named = Object.entries(steps).filter(([, number]) => number).map(([name, number]) => `${count(number)} ${name}`);
      words.push(`${counted(own, "step")} in a slot (${named.join(", ")})`);
    }
    if (before) words.push(`it got the slot that #${before.number} left at iteration ${count(before.n)}`);
    if (request.preempted) words.push(`preempted ${counted(request.preempted, "time")}`);
    if (record) words.push(record.state === "finished" ? `finished: ${record.finish_reason}` : record.state);
    return words.length ? `${words.join("; ")}.` : "Waiting in the queue.";
  }

  function tableOf(heads, rows) {
    const table = element("table");
    const head = table.appendChild(element("thead")).appendChild(element("tr"));
    for (const text of heads) head.appendChild(element("th", "", text)).scope = "col";
    const body = table.appendChild(element("tbody"));
    for (const cells of rows) {
      const row = body.appendChild(element("tr"));
      for (const [k, text] of cells.entries()) row.append(element("td", k === cells.length - 1 ? "text" : "", text));
    }
    return table;
  }

  // The server's totals of its waiting, and what this page saw step by step.
  function whyItWaited(record, request, history) {
    const totals = record?.waited ?? [];
    const joined = record ? record.scheduled_at !== null : request.joined !== null && request.arrived !== null;
    const steps = totals.reduce((sum, wait) => sum + wait.iterations, 0);
    // A server counts even the moment between an arrival and the next step as waiting.
    if (joined && !steps && (record || history.complete) && !history.waits.length) {
      return [element("h3", "", "Why it waited"), element("p", "sub", AT_ONCE)];
    }
    return [...reasons(totals, history.waits), ...stepByStep(history)];
  }

  function reasons(totals, waits) {
    if (!totals.length) return [];
    const rows = totals.map((wait) =>
      [count(wait.iterations), seconds(wait.seconds), REASONS[seenAs(wait, waits)] ?? wait.reason]);
    return [element("h3", "", "Why it waited"), tableOf(["iterations", "time", "why"], rows)];
  }

  // The reason for a wait: the server counts the step in progress at the arrival under policy_order.
  function seenAs({ reason }, waits) {
    const only = waits.length && waits.every((wait) => wait.reason === "in_progress");
    return reason === "policy_order" && only ? "in_progress" : reason;
  }

  function stepByStep({ waits, complete, oldest }) {
    const parts = [element("h3", "", "While it waited, step by step")];
    if (!complete) parts.push(element("p", "sub", `This page no longer has the steps before iteration ${count(oldest)}.`));
    if (!waits.length) return [];
    const rows = waits.map((wait) => [
      wait.from === wait.to ? count(wait.from) : `${count(wait.from)}–${count(wait.to)}`,
      seconds(wait.seconds), count(wait.joined), circumstances(wait), REASONS[wait.reason] ?? wait.reason,
    ]);
    const hidden = rows.length - ROWS;
    if (hidden > 0) rows.splice(ROWS / 2, hidden, ["…", "", "", "", `${counted(hidden, "change")} of the reason not shown`]);
    return [...parts, tableOf(["iterations", "time", "others joined", "at their end", "why"], rows)];
  }

  function circumstances({ reason, taken, held, slots, pages }) {
    if (reason === "kv_full") return `${count(pages.used)} of ${count(pages.total)} KV pages used`;
    return `${count(taken)} of ${counted(slots, "slot")} taken${held ? `, ${count(held)} held` : ""}`;
  }

  Object.assign(EB, { Explain });
})(globalThis);
