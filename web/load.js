// The buttons that send a load to this server, and its progress.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const $ = (id) => document.getElementById(id);
  const TAKES = 20; // seconds that the load takes which the form suggests
  const MOST = 400; // requests of a load
  const FULL = 0.75; // of the slots are taken in a step whose pace is the server's
  const RECENT = 200; // steps from which that pace is taken

  // headers(more) returns a request's headers with the API key; ended(load) shows the result of a load, and returns whether
  // there is one.
  function setUp({ headers, ended }) {
    let watching = null;
    let endless = null; // the parameters of a load without an end that was replaced, to be brought back
    let rate = 0; // tokens per second of a full batch; 0 is unknown

    const number = (id) => Number($(id).value);
    const json = () => headers({ "Content-Type": "application/json" });

    $("load-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (isValid()) send(load(number("load-rate")));
    });
    $("burst").addEventListener("click", () => isValid() && send(load(0)));
    $("first-burst").addEventListener("click", () => {
      $("load-count").value = "40";
      if (isValid()) send(load(0));
    });
    $("load-stop").addEventListener("click", () => fetch("load", { method: "DELETE", headers: headers({}) }));
    $("load-form").addEventListener("input", sayDuration);
    addEventListener("pagehide", () => restore({ keepalive: true }));

    // The browser says beside the field what is wrong. The form has novalidate, so that this is asked for every button.
    function isValid() {
      const swapped = number("load-min") > number("load-max");
      $("load-min").setCustomValidity(swapped ? "The first must not exceed the second." : "");
      return $("load-form").reportValidity();
    }

    function load(rate) {
      return {
        count: number("load-count"), rate, min_tokens: number("load-min"), max_tokens: number("load-max"), seed: number("load-seed"),
      };
    }

    // Fit what the form suggests to the pace that the server has shown with a full batch; what somebody typed stays.
    function fit(model) {
      const full = model.columns.slice(-RECENT).filter((column) => column.output && column.decodes >= FULL * column.slots);
      const seconds = full.reduce((sum, column) => sum + column.seconds, 0);
      if (full.length < 5 || $("load-form").contains(document.activeElement)) return;
      rate = full.reduce((sum, column) => sum + column.output, 0) / seconds;
      const mean = (number("load-min") + number("load-max")) / 2;
      const count = Math.max(4, Math.min(MOST, Number(((TAKES * rate) / mean).toPrecision(1))));
      suggest("load-count", count);
      suggest("load-rate", Number(((2 * count) / TAKES).toPrecision(1))); // half of the time, so that requests wait
      sayDuration();
    }

    function suggest(id, value) {
      const field = $(id), untouched = field.value === field.defaultValue;
      field.defaultValue = String(value);
      if (untouched) field.value = field.defaultValue;
    }

    function sayDuration() {
      const tokens = (number("load-count") * (number("load-min") + number("load-max"))) / 2;
      EB.put("load-takes", rate && tokens ? `about ${EB.count(Math.max(1, Number((tokens / rate).toPrecision(2))))} s` : "");
    }

    async function send(body) {
      $("load-offer").hidden = true;
      try {
        const reply = await fetch("load", { method: "POST", headers: json(), body: JSON.stringify(body) });
        if (reply.status === 429 && (await offer(body))) return;
        if (!reply.ok) throw await EB.refusal(reply);
        EB.showError("load-error", "");
        $("load-result").hidden = true;
        show(await reply.json());
        clearInterval(watching);
        watching = setInterval(watch, 500);
      } catch (error) {
        EB.showError("load-error", error.message);
      }
    }

    // Offer to send a load in place of the running one if that is a demonstration's, which has no end; return whether it is.
    async function offer(body) {
      const reply = await fetch("load", { headers: headers({}) });
      const { params } = reply.ok ? await reply.json() : {};
      if (!params?.users) return false;
      EB.showError("load-error", "");
      $("load-offer").hidden = false;
      $("load-replace").onclick = () => {
        endless = params;
        send({ ...body, replace: true });
      };
      return true;
    }

    async function restore(more = {}) {
      if (!endless) return;
      const body = JSON.stringify({ ...endless, replace: true });
      endless = null;
      await fetch("load", { method: "POST", headers: json(), body, ...more }).catch(() => {});
    }

    async function watch() {
      try {
        const reply = await fetch("load", { headers: headers({}) });
        if (reply.ok) show(await reply.json());
      } catch {
        clearInterval(watching); // the banner reports that the server is gone
      }
    }

    function show(load) {
      const failed = load.failed ? `, ${EB.count(load.failed)} rejected or failed` : "";
      EB.put("load-state", `${EB.count(load.done)} of ${EB.count(load.total)} answered${failed}`);
      $("load-stop").disabled = !load.active;
      $("load-stop").title = load.active ? "" : "no load is running";
      for (const id of ["poisson", "burst"]) {
        $(id).disabled = load.active;
        $(id).title = load.active ? "a load is running: wait, or stop it" : "";
      }
      if (load.active) return;
      clearInterval(watching);
      finish(load);
    }

    async function finish(load) {
      $("load-result").hidden = !(await ended(load));
      await restore();
    }

    return { fit };
  }

  Object.assign(EB, { setUpLoad: setUp });
})(globalThis);
