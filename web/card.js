// The result of a load: what was measured, and beside it what other policies would have made of the same requests. It asks
// by itself when a load that this page sent has ended, and about the latest requests when a button says so.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const SAME = 0.05; // smaller differences, and those within the simulator's own error, mean nothing
  const USUAL = ["nobatch", "static", "dynamic"];
  const QUEUES = ["dynamic", "dynamic+sjf", "dynamic+vtc"]; // before an upstream, which batches by itself
  const GUESS = "a guess: steps of such sizes were not measured here";
  const ENOUGH = 12; // steps on the page before it offers to simulate

  // Verdicts about lanes, as text; they know nothing of the page.

  // How large a difference must be to mean something.
  function threshold(answer) {
    return Math.max(SAME, answer.cost.misfit ?? 0, ...Object.values(answer.error ?? {}).map(Math.abs));
  }

  // A simulated lane in multiples of the served policy's own simulation: null if they cannot be told apart.
  function ratio(value, base, least) {
    return Math.abs(value / base - 1) <= least ? null : value / base;
  }

  function times(ratio) {
    return `× ${ratio.toFixed(ratio >= 10 ? 0 : ratio >= 1 ? 1 : 2)}`;
  }

  // One sentence for a policy that was not served.
  function verdict(lane, base, least) {
    const mean = ratio(lane.latency_mean_s, base.latency_mean_s, least);
    const tail = ratio(lane.latency_p99_s, base.latency_p99_s, least);
    const named = (name, by) => (by === null ? `${name} not distinguishable` : `${name} ${times(by)}`);
    const words = [named("mean latency", mean), named("p99", tail)];
    if (lane.held > 0.005) words.push(`${EB.percent(lane.held)} of the slot-steps held by finished requests`);
    if (!lane.whole) words.push("without some requests, which it refuses");
    const all = mean === null && tail === null && lane.held <= 0.005 && lane.whole;
    const text = `${lane.policy}: ${all ? "not distinguishable" : words.join(", ")}`;
    return `${text}${lane.extrapolates ? ` (${GUESS})` : ""}.`;
  }

  // What the differences are measured against, and how far they can be trusted.
  function basis(answer) {
    const { cost, error, served } = answer;
    const from = cost.steps ? `${EB.count(cost.steps)} steps of this server, which fit within ${Math.round(100 * cost.misfit)} %` : cost.from;
    const words = [`Simulated with costs from ${from}; compared with ${served} as simulated`];
    if (error) {
      const [mean, tail, whole] = ["latency_mean_s", "latency_p99_s", "makespan_s"].map((name) => signed(error[name]));
      words.push(`that is off by ${mean} in mean latency, ${tail} in p99 and ${whole} in time`);
    }
    words.push(`differences up to ${Math.round(100 * threshold(answer))} % count as not distinguishable`);
    words.push("requests arrive when they did");
    return `${words.join("; ")}.`;
  }

  function signed(share) {
    const text = Math.abs(100 * share).toFixed(1);
    const sign = Number(text) === 0 ? "" : share > 0 ? "+" : "−";
    return `${sign}${text} %`;
  }

  // How far the served policy is from what no policy can beat, and which of its decisions cost that.
  function regret({ served, bound }) {
    const parts = Object.entries(bound.above_by ?? {}).map(([name, share]) => [name, Math.round(100 * share)]);
    const by = parts.filter(([name, points]) => points && name !== "other").map(([name, points]) => `${name} ${points}`).join(", ");
    const words = `${served} as simulated: mean latency ${Math.round(100 * bound.above)} % above the lower bound of any policy`;
    return `${words}${by && ` (${by})`}.`;
  }

  const FIGURES = [
    ["mean latency", "latency_mean_s"], ["p99", "latency_p99_s"], ["all done after", "makespan_s"],
  ];

  function table(answer, least) {
    const base = answer.lanes.find((lane) => !lane.measured);
    const whole = EB.element("table");
    const head = whole.appendChild(EB.element("thead")).appendChild(EB.element("tr"));
    for (const text of ["policy", ...FIGURES.map(([name]) => name), "useful slots", "held"]) {
      head.append(Object.assign(EB.element("th", "", text), { scope: "col" }));
    }
    const body = whole.appendChild(EB.element("tbody"));
    for (const lane of answer.lanes) {
      const row = body.appendChild(EB.element("tr", lane.measured ? "measured" : ""));
      const name = row.appendChild(EB.element("th", "", lane.policy));
      name.scope = "row";
      name.append(EB.element("small", "", ` ${EB.whatIf.nameOf(lane, answer)}`));
      for (const [, field] of FIGURES) {
        const cell = row.appendChild(EB.element("td", "", EB.seconds(lane[field])));
        const by = lane.measured || lane === base ? null : ratio(lane[field], base[field], least);
        if (by !== null) cell.append(EB.element("small", by > 1 ? "more" : "less", ` ${times(by)}`));
        else if (!lane.measured && lane !== base) cell.append(EB.element("small", "", " ≈"));
      }
      for (const share of [lane.useful, lane.held]) row.append(EB.element("td", "", share === null ? "–" : EB.percent(share)));
    }
    const wide = EB.element("div", "wide-table");
    Object.assign(wide, { tabIndex: 0, role: "region" });
    wide.setAttribute("aria-label", "The policies compared");
    wide.append(whole);
    return wide;
  }

  // The figures of what was served; of the simulation of a workload there are none.
  function tiles(answer) {
    const lane = answer.lanes[0];
    const list = EB.element("dl");
    const tile = (name, value, sub) => {
      const box = list.appendChild(EB.element("div", "tile"));
      box.append(EB.element("dt", "", name), EB.element("dd", "", value), EB.element("dd", "sub", sub));
    };
    tile("requests", EB.count(lane.requests), "answered");
    tile("time", EB.seconds(lane.makespan_s), "until the last answer");
    tile("tokens/s", EB.figure(lane.tokens_per_s), "generated");
    tile("mean latency", EB.seconds(lane.latency_mean_s), "arrival to answer");
    tile("p99 latency", EB.seconds(lane.latency_p99_s), "of 100, 99 are shorter");
    tile("batch fill", lane.batch_fill === null ? "–" : EB.percent(lane.batch_fill),
      lane.rows_in_vain === null ? "of the slots" : `${EB.percent(lane.rows_in_vain)} of rows wasted`);
    return list;
  }

  // headers(more) returns a request's headers with the API key, facts() what is served, live is the live picture's model.
  class Card {
    constructor(box, { headers, facts, live }) {
      Object.assign(this, { box, headers, facts, live, answer: null });
      const bar = box.appendChild(EB.element("div", "bar"));
      this.title = bar.appendChild(EB.element("h2", "", "What if another policy had served?"));
      this.tools = bar.appendChild(EB.element("div", "tools"));
      this.result = box.appendChild(EB.element("div", "result"));
      this.gamma = new EB.GammaSlider(() => this.simulate(...this.last));
      box.append(this.gamma.label);
      this.gamma.label.hidden = true;
      this.form = this.makeForm();
      this.state = box.appendChild(EB.element("p", "sub"));
      this.state.setAttribute("role", "status");
      const how = (this.how = box.appendChild(EB.element("details", "sub")));
      how.append(EB.element("summary", "", "? How far to trust this"), EB.element("p"));
      how.hidden = true;
      this.error = box.appendChild(EB.element("p", "error"));
      this.error.setAttribute("role", "alert");
      this.error.hidden = true;
      const lanes = box.appendChild(EB.element("div", "show"));
      lanes.hidden = true;
      this.lanes = new EB.whatIf.LaneShow(lanes);
      this.race = this.button("Show as lanes", () => this.toggleLanes());
      EB.setUpSave(this);
      this.tools.hidden = true;
      const offer = setInterval(() => {
        if (live.columns.length < ENOUGH) return;
        clearInterval(offer);
        this.box.hidden = false;
      }, 1000);
    }

    button(text, act) {
      const button = this.tools.appendChild(EB.element("button", "", text));
      button.type = "button";
      button.addEventListener("click", act);
      return button;
    }

    makeForm() {
      const form = this.box.appendChild(EB.element("form", "buttons"));
      form.append(EB.element("span", "sub", "Simulate"));
      this.boxes = new Map();
      for (const name of USUAL) this.addPolicy(form, name, true);
      this.more = form.appendChild(EB.element("select"));
      this.more.setAttribute("aria-label", "another policy");
      this.more.append(new Option("another policy …", ""));
      this.more.addEventListener("focus", () => this.offerPolicies(), { once: true });
      this.more.addEventListener("change", () => {
        if (this.more.value && !this.boxes.has(this.more.value)) this.addPolicy(form, this.more.value, true);
        this.more.value = "";
      });
      form.append(EB.element("span", "sub", "on"));
      this.of = form.appendChild(EB.element("select"));
      this.of.setAttribute("aria-label", "requests to simulate");
      for (const [text, value] of [["the latest requests", "latest"], ["the last load", "load"]]) this.of.append(new Option(text, value));
      for (const name of ["clipped-normal", "short-long", "anyscale"]) this.of.append(new Option(`workload ${name}`, name));
      this.go = form.appendChild(EB.element("button", "primary", "Simulate"));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.simulate(this.of.value);
      });
      return form;
    }

    // Offer what makes a difference in a queue or in vLLM, which send no load themselves.
    fitQueue() {
      const load = this.of.querySelector("[value=load]");
      if (!load) return;
      load.remove();
      for (const box of this.boxes.values()) box.parentElement.remove();
      this.boxes.clear();
      for (const name of QUEUES) this.addPolicy(this.form, name, true);
    }

    addPolicy(form, name, on) {
      const label = EB.element("label", "field");
      const box = label.appendChild(EB.element("input"));
      Object.assign(box, { type: "checkbox", checked: on });
      label.append(name);
      this.boxes.set(name, box);
      if (this.more) form.insertBefore(label, this.more);
      else form.append(label);
    }

    async offerPolicies() {
      const reply = await fetch("policy", { headers: this.headers({}) });
      if (!reply.ok) return;
      const { policies, orders } = await reply.json();
      const names = [...Object.keys(policies), ...Object.keys(orders).map((name) => `dynamic+${name}`)];
      this.more.append(...names.filter((name) => !this.boxes.has(name)).map((name) => new Option(name, name)));
    }

    // A load that this page sent has ended: show its result. Return whether there is one.
    async after(load) {
      if (load.done < 2) return false;
      this.box.hidden = false;
      this.of.value = load.params?.users ? "latest" : "load"; // the load of users has no end of its own
      await this.simulate(this.of.value, load.total || undefined);
      return true;
    }

    async simulate(of, count = 200) {
      if (this.go.disabled) { // the server simulates one question at a time
        this.next = [of, count];
        return;
      }
      const policies = [...this.boxes].filter(([, box]) => box.checked).map(([name]) => name);
      this.last = [of, count];
      this.gamma.label.hidden = !policies.includes(EB.GammaSlider.POLICY);
      const which = ["latest", "load"].includes(of) ? { requests: of } : { workload: of, rate: Number(document.getElementById("load-rate")?.value) || 4 };
      this.error.hidden = true;
      this.go.disabled = true;
      EB.put(this.state, `Simulating ${policies.join(", ") || "the served policy"} …`);
      try {
        const answer = await EB.whatIf.ask({ policies, options: this.gamma.options, count: Math.min(count, 400), ...which }, this.headers);
        this.show(answer, of);
        EB.put(this.state, "");
        EB.put(this.how.lastChild, basis(answer));
        this.how.hidden = false;
      } catch (error) {
        EB.put(this.state, "");
        this.fail(error.message);
      } finally {
        this.go.disabled = false;
        const { next } = this;
        this.next = null;
        if (next) await this.simulate(...next);
      }
    }

    fail(text) {
      EB.put(this.error, text);
      this.error.hidden = false;
    }

    // What was served, for a reader who does not see the page.
    served() {
      const { model, slots } = this.facts();
      return `${model ?? "a server"}, ${EB.count(slots ?? this.answer.slots)} slots, effective-batching`;
    }

    show(answer, of) {
      this.answer = answer;
      const least = threshold(answer);
      const measured = answer.lanes[0].measured;
      const base = answer.lanes.find((lane) => !lane.measured);
      const what = { load: "The last load", latest: "The latest requests" }[of] ?? `Workload ${of}`;
      this.heading = `${what}: ${EB.count(answer.requests.length)} requests, ${measured ? "served by" : "simulated under"} ${answer.served}`;
      EB.put(this.title, this.heading);
      const said = EB.element("ul", "said");
      const held = answer.lanes[0].held;
      if (held > 0.005) said.append(EB.element("li", "", `${answer.served}: ${EB.percent(held)} of the slot-steps were held by finished requests.`));
      if (answer.bound) said.append(EB.element("li", "", regret(answer)));
      for (const lane of answer.lanes) {
        if (!lane.measured && lane !== base) said.append(EB.element("li", "", verdict(lane, base, least)));
      }
      this.result.replaceChildren(...(measured ? [tiles(answer)] : []), said, table(answer, least));
      this.tools.hidden = false;
      this.lanes.hide();
      EB.put(this.race, "Show as lanes");
    }

    toggleLanes() {
      const shown = !this.lanes.box.hidden;
      if (shown) this.lanes.hide();
      else this.lanes.show(this.answer, this.live);
      EB.put(this.race, shown ? "Show as lanes" : "Hide lanes");
    }
  }

  Object.assign(EB, { Card, verdict, ratio, threshold });
})(globalThis);
