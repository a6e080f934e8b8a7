// Why one request took as long as it did: its times, why it waited, and what was computed with it. The server's record of it
// is shown where there is one and otherwise, as in a replay, what the step records contain.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { count, seconds, element } = EB;
  const REASONS = {
    slots_full: "all slots were taken",
    token_budget: "other requests used up the step's token budget",
    kv_full: "no KV pages were free",
    policy_order: "the policy made it wait: for its turn, or for the batch to end",
    window: "the policy waited for more requests",
  };

  class Explain {
    // `now()` is the moment shown on the clock of the records; headers(more) returns a request's headers with the API key.
    constructor(box, player, { now, headers }) {
      this.box = box;
      this.player = player;
      this.now = now;
      this.headers = headers;
      this.chosen = 0; // the number of the request; 0 is none
      this.forget();
    }

    forget() {
      this.record = null;
      this.problem = "";
      this.of = 0;
      this.at = 0;
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
        if (!this.box.hidden || force) this.show(null);
        if (chosen && player.model.columns.length) this.chosen = 0;
        return;
      }
      if (this.of === chosen && (this.record?.state === "finished" || performance.now() - this.at < 1000)) return;
      if (this.of !== chosen) this.show(request); // show immediately what this page knows
      this.of = chosen;
      this.at = performance.now();
      if (player.isLive && !(await this.ask(request))) return;
      if (!this.box.contains(document.activeElement)) this.show(request);
    }

    // Ask the server for its record; return whether the request is still the chosen one.
    async ask(request) {
      let record = null, problem = "";
      try {
        const id = encodeURIComponent(request.id.split("/")[0]);
        const reply = await fetch(`requests/${id}`, { headers: this.headers({}) });
        if (reply.ok) record = await reply.json();
        else problem = "The server keeps only the last 1,000 requests, and this one is older.";
      } catch {
        record = this.record;
        problem = "The server cannot be reached.";
      }
      if (this.chosen !== request.number) return false;
      this.record = record;
      this.problem = problem;
      return true;
    }

    show(request) {
      showDetail(this.box, request, this.record, this.problem, () => this.choose(this.chosen), this.now());
    }
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
          element("td", "", count(iterations)),
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
    if (!record) return request.joinedAt ? `Joined at iteration ${count(request.joinedAt)}.` : "Waiting in the queue.";
    const words = [`${count(record.prompt_tokens)} prompt tokens, ${count(record.output_tokens)} output tokens`];
    if (record.cached_tokens) words.push(`${count(record.cached_tokens)} prompt tokens cached`);
    if (record.iterations) {
      words.push(`iterations ${count(record.iterations[0])} to ${count(record.iterations[1])}`);
      words.push(`batch size ${record.batch.mean.toFixed(1)} on average, ${record.batch.max} at most`);
    }
    words.push(record.state === "finished" ? `finished: ${record.finish_reason}` : record.state);
    return `${words.join("; ")}.`;
  }

  Object.assign(EB, { Explain });
})(globalThis);
