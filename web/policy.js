// The menu behind the policy's badge: the policies to learn first, and folded every loop and order, each with one line of
// description, and their options. It switches
// the server's policy with PUT /policy and shows errors beside the button. It does not know the picture or the load.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const FIRST = { // the policies to learn first, and where they come from
    nobatch: "One request at a time, as a server without batching computes.",
    static: "Requests start together and end together (NVIDIA FasterTransformer).",
    dynamic: "Requests join and leave between any two steps (Orca, Yu et al. 2022).",
    chunked: "Long prompts are read in pieces, so that the others go on writing (Sarathi-Serve, Agrawal et al. 2024).",
    "dynamic+sjf": "As dynamic, but the request with the shortest answer is next (SSJF, Qiu et al. 2024).",
  };
  const QUEUES = ["dynamic", "dynamic+sjf", "dynamic+vtc", "dynamic+edf", "adaptive+vtc"]; // to begin with before an upstream
  const DEFAULT_ORDER = "fcfs";
  const UNLIMITED = 2 ** 53; // a default beyond it means no limit, and is longer than a box

  // The active policy and the available ones; an error has the server's message and its status.
  async function readPolicies(headers) {
    return answer(await fetch("policy", { headers: headers({}) }));
  }

  // Switch the server's policy; the promise is fulfilled after the switch. Options may be as GET /policy has them.
  async function switchPolicy(headers, policy, options = {}, more = {}) {
    return answer(await fetch("policy", {
      ...more, method: "PUT",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify({ policy, options }, (_, value) => (Array.isArray(value) ? value.join(",") : value)),
    }));
  }

  async function answer(reply) {
    if (!reply.ok) throw await EB.refusal(reply);
    return reply.json();
  }

  // The loop and the order in a policy's name.
  function partsOf(policy) {
    const [loop, order] = policy.split("+");
    return { loop, order: order || DEFAULT_ORDER };
  }

  // What made the server go back from a policy.
  function failureText({ policy, hook, file, line, error, now, time }) {
    const at = new Date(1000 * time).toLocaleTimeString();
    const where = hook ? ` in ${hook}(), line ${line} of ${file}` : "";
    return `At ${at} the policy ${policy} failed${where}: ${error}. The server went back to ${now} and kept every request.`;
  }

  function nameOf(loop, order) {
    return order === DEFAULT_ORDER ? loop : `${loop}+${order}`;
  }

  function radio(group, value, text, chosen) {
    const label = EB.element("label", "choice");
    const input = label.appendChild(EB.element("input"));
    Object.assign(input, { type: "radio", name: group, value, checked: chosen });
    const words = label.appendChild(EB.element("span"));
    words.append(EB.element("b", "", value), EB.element("span", "sub", text.replaceAll("`", "")));
    return label;
  }

  function group(title, name, entries, chosen) {
    const box = EB.element("fieldset", "choices");
    if (title) box.append(EB.element("legend", "", title));
    const list = box.appendChild(EB.element("div", "list"));
    for (const [value, text] of entries) list.append(radio(name, value, text, value === chosen));
    return box;
  }

  // A labeled input of an option; it is empty, or unchanged, while the option has its default.
  function field(option, value) {
    const label = EB.element("label", "option");
    const usual = Number(option.default) > UNLIMITED ? "no limit" : option.default || "none";
    const changed = value !== undefined && text(value) !== text(option.default);
    let input;
    if (option.type === "choice" || option.type === "boolean") {
      input = EB.element("select");
      for (const choice of option.choices ?? ["on", "off"]) {
        const word = choice === option.default ? `${choice} (default)` : choice;
        input.append(new Option(word, choice, false, choice === (changed ? text(value) : option.default)));
      }
    } else {
      input = EB.element("input");
      input.type = option.type === "number" || option.type === "integer" ? "number" : "text";
      if (input.type === "number") input.step = option.type === "integer" ? "1" : "any";
      if (option.minimum !== undefined) input.min = option.minimum;
      if (option.maximum !== undefined) input.max = option.maximum;
      input.placeholder = usual;
      input.value = changed ? text(value) : "";
    }
    input.name = option.name;
    input.dataset.usual = option.default;
    const bounds = input.tagName === "SELECT" ? "" : `${option.bounds}, `; // the menu has its choices
    const help = EB.element("span", "sub", `${option.help}; ${bounds}by default ${usual}`);
    help.id = `policy-option-${option.name}`;
    input.setAttribute("aria-describedby", help.id);
    label.append(EB.element("b", "", option.name), input);
    const row = EB.element("div", "option-row");
    row.append(label, help);
    return row;
  }

  // An option's value as the server writes defaults.
  function text(value) {
    if (value === true) return "on";
    if (value === false) return "off";
    if (Array.isArray(value)) return value.join(",");
    const number = Number(value);
    return value !== "" && Number.isFinite(number) ? String(number) : String(value);
  }

  // A slider for the option gamma of the order boost; until it is moved, the policy estimates it. `changed` is called after each move.
  class GammaSlider {
    constructor(changed) {
      this.label = EB.element("label", "gamma", "boost ");
      const scale = this.label.appendChild(EB.element("span", "grow", "shortest first"));
      this.range = scale.appendChild(EB.element("input"));
      Object.assign(this.range, { type: "range", min: "-3", max: "2", step: "0.25", value: "-1" }); // of the logarithm
      scale.append("order of arrival");
      this.text = this.label.appendChild(EB.element("output"));
      this.set(0);
      this.range.addEventListener("input", () => this.set(Number((10 ** this.range.value).toPrecision(2))));
      this.range.addEventListener("change", changed);
    }

    // Use a gamma per second, or with 0 the policy's estimate.
    set(gamma) {
      this.gamma = gamma;
      if (gamma) this.range.value = String(Math.log10(gamma));
      EB.put(this.text, gamma ? `γ ${gamma} per second` : "γ estimated");
    }

    // The options of each policy, as questions have them.
    get options() {
      return this.gamma ? { [GammaSlider.POLICY]: { gamma: this.gamma } } : {};
    }
  }
  GammaSlider.POLICY = "dynamic+boost";

  class PolicyMenu {
    // headers(more) returns a request's headers with the API key, queues() whether the server is a queue before others.
    constructor(badge, menu, headers, queues = () => false) {
      this.queues = queues;
      this.badge = badge;
      this.menu = menu;
      this.headers = headers;
      this.form = menu.appendChild(EB.element("form"));
      menu.addEventListener("beforetoggle", (event) => { // or a choice in the old form would be lost
        if (event.newState === "open") this.form.replaceChildren(EB.element("p", "", "Loading…"));
      });
      menu.addEventListener("toggle", (event) => {
        badge.setAttribute("aria-expanded", String(event.newState === "open"));
        if (event.newState === "open") this.open();
      });
      this.form.addEventListener("change", (event) => {
        if (event.target.type !== "radio") return;
        if (event.target.name === "first") this.choose(partsOf(event.target.value));
        this.markFirst();
        this.showOptions();
      });
      this.form.addEventListener("input", (event) => (event.target.type === "search" ? this.search(event.target.value) : this.showChange()));
      this.form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.submit();
      });
    }

    async open() {
      try {
        this.known = await readPolicies(this.headers);
      } catch (error) {
        this.form.replaceChildren(EB.element("p", "problem", `The policies cannot be read: ${error.message}`));
        return;
      }
      this.build();
    }

    build() {
      const { known } = this;
      const { loop, order } = partsOf(known.policy);
      const loops = Object.entries(known.policies);
      const orders = Object.entries(known.orders).sort(([a], [b]) => (b === DEFAULT_ORDER) - (a === DEFAULT_ORDER));
      const head = EB.element("p", "", "The next step follows the new policy. Waiting and running requests stay.");
      const parts = [EB.element("h2", "", "Batching policy"), head];
      if (!(loop in known.policies)) {
        parts.push(EB.element("p", "problem",
          `${known.policy} is not in this list, because it was named at the start: only a restart brings it back.`));
      }
      if (known.last_failure) parts.push(EB.element("p", "problem", failureText(known.last_failure)));
      const first = this.queues() ? QUEUES.map((name) => [name, this.does(name)]) : Object.entries(FIRST);
      parts.push(group("", "first", first, known.policy));
      const all = EB.element("details");
      all.open = !first.some(([name]) => name === known.policy);
      all.append(EB.element("summary", "", `All ${loops.length} loops and ${orders.length} orders`));
      const search = all.appendChild(EB.element("input"));
      Object.assign(search, { type: "search", placeholder: "search, such as fair or deadline" });
      search.setAttribute("aria-label", "search the loops and orders");
      const columns = all.appendChild(EB.element("div", "columns"));
      columns.append(
        group("Loop: who joins, and when", "loop", loops, loop in known.policies ? loop : "dynamic"),
        group("Order: who is first in line", "order", orders, order in known.orders ? order : DEFAULT_ORDER),
      );
      this.options = EB.element("div", "options");
      this.button = EB.element("button", "primary", "");
      this.problem = EB.element("p", "problem");
      this.problem.setAttribute("role", "alert");
      const close = EB.element("button", "", "Close");
      close.type = "button";
      close.addEventListener("click", () => this.menu.hidePopover());
      const foot = EB.element("div", "foot");
      foot.append(this.button, close, this.problem);
      this.form.replaceChildren(...parts, all, this.options, foot);
      this.showOptions();
      for (const input of this.form.querySelectorAll("input:checked")) {
        const { offsetParent: list } = input.parentElement;
        const { offsetTop, offsetHeight } = input.parentElement;
        if (list?.className === "list" && offsetTop + offsetHeight > list.clientHeight) list.scrollTop = offsetTop - 40;
      }
      const checked = [...this.form.querySelectorAll("input:checked")].find((input) => input.checkVisibility());
      checked?.focus({ preventScroll: true });
    }

    // What a policy does, in the words of the queue.
    does(policy) {
      const { loop, order } = partsOf(policy);
      const parts = order === DEFAULT_ORDER || loop !== "dynamic" ? [this.known.policies[loop]] : [];
      if (order !== DEFAULT_ORDER) parts.push(this.known.orders[order]);
      return parts.join("; ");
    }

    // Choose a loop and an order.
    choose(parts) {
      for (const [name, value] of Object.entries(parts)) this.form.querySelector(`input[name="${name}"][value="${value}"]`).checked = true;
    }

    // Mark the policy to learn first that the chosen loop and order are, if they are one.
    markFirst() {
      const { loop, order } = this.chosen;
      for (const input of this.form.querySelectorAll("input[name=first]")) input.checked = input.value === nameOf(loop, order);
    }

    // Show only the loops and orders whose name or description has this text; the chosen ones stay.
    search(text) {
      for (const choice of this.form.querySelectorAll("details .choice")) {
        const found = choice.textContent.toLowerCase().includes(text.trim().toLowerCase());
        choice.hidden = !found && !choice.firstChild.checked;
      }
    }

    get chosen() {
      const value = (name) => this.form.querySelector(`input[name="${name}"]:checked`).value;
      return { loop: value("loop"), order: value("order") };
    }

    showOptions() {
      const { loop, order } = this.chosen;
      const { known } = this;
      const now = partsOf(known.policy);
      const part = (kind, name, active) =>
        known.options_of[kind][name].map((option) => field(option, name === active ? known.options[option.name] : undefined));
      const rows = [...part("policies", loop, now.loop), ...part("orders", order, now.order)];
      this.options.replaceChildren(...rows);
      this.options.hidden = !rows.length;
      this.served = loop === now.loop && order === now.order ? this.values : null;
      this.problem.textContent = "";
      this.showChange();
    }

    // The options as they are entered, as one text.
    get values() {
      return JSON.stringify(this.inputs.map((input) => input.value || input.dataset.usual));
    }

    get inputs() {
      return [...this.options.querySelectorAll("input, select")];
    }

    // There is nothing to switch to while what is chosen is what serves.
    showChange() {
      const { loop, order } = this.chosen;
      this.button.disabled = this.values === this.served;
      this.button.textContent = this.button.disabled ? `${nameOf(loop, order)} is serving` : `Switch to ${nameOf(loop, order)}`;
    }

    async submit() {
      const { loop, order } = this.chosen;
      const { inputs } = this;
      const given = inputs.filter((input) => input.value !== "" && input.value !== input.dataset.usual);
      const options = Object.fromEntries(given.map((input) => [input.name, input.value]));
      this.button.disabled = true;
      this.problem.textContent = "";
      for (const input of inputs) input.removeAttribute("aria-invalid");
      try {
        await switchPolicy(this.headers, nameOf(loop, order), options);
        this.menu.hidePopover(); // the focus returns to the badge
      } catch (error) {
        this.problem.textContent = error.message;
        const wrong = inputs.find((input) => error.message.includes(`option ${input.name} `));
        wrong?.setAttribute("aria-invalid", "true");
        wrong?.focus();
      } finally {
        this.showChange();
      }
    }
  }

  Object.assign(EB, { PolicyMenu, GammaSlider, readPolicies, switchPolicy, partsOf, failureText });
})(globalThis);
