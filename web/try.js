// The prompt box: a text to continue, or a chat with a model that has a chat template. It keeps the turns of a chat, shows how
// long this answer took, and cancels its request when the page is left.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const $ = (id) => document.getElementById(id);
  const NUMBERS = { temperature: "temperature", "top-p": "top_p", "top-k": "top_k", seed: "seed" }; // by the id of the field
  const USUAL = { temperature: 1, top_p: 1, top_k: 0 }; // without a recommendation of the model's authors
  const ALTERNATIVES = 5;
  // What the form holds until someone changes it.
  const MODES = {
    chat: { label: "Message", example: "What is the capital of France?", tokens: 256, hint: "Enter sends it, Shift+Enter breaks the line" },
    text: { label: "Prompt", example: "ROMEO:", tokens: 60, hint: "Ctrl+Enter sends it" },
  };

  class Playground {
    // headers(more) returns a request's headers with the API key; sent(id) is called when a request is sent, and
    // explain(id) to have it explained.
    constructor({ headers, sent, explain }) {
      this.headers = headers;
      this.sent = sent;
      this.answer = new EB.Answer($("answer"), $("alternatives"));
      this.control = null;
      this.id = "";
      this.turns = []; // messages of the chat
      this.last = null; // the elements of its last turn: what was asked, and the answer
      this.mode = "text";
      $("mode").addEventListener("change", () => this.setMode($("mode").value));
      $("new-chat").addEventListener("click", () => this.restart());
      $("cancel").addEventListener("click", () => this.stop());
      $("explain-answer").addEventListener("click", () => explain(this.id));
      $("copy-answer").addEventListener("click", () => EB.copy($("copy-answer"), this.answer.turn, this.said));
      $("regenerate").addEventListener("click", () => this.regenerate());
      EB.put("base-url", `${location.origin}/v1`);
      $("copy-url").addEventListener("click", () => EB.copy($("copy-url"), $("base-url")));
      $("prompt").addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.isComposing) return;
        const sends = event.ctrlKey || event.metaKey || (this.mode === "chat" && !event.shiftKey);
        if (!sends) return;
        event.preventDefault(); // Enter in a chat must not break the line, even while an answer is being written
        if (!this.control) $("prompt-form").requestSubmit();
      });
      $("prompt-form").addEventListener("submit", (event) => {
        event.preventDefault();
        const blank = !$("prompt").value.trim(); // spaces alone pass `required`
        $("prompt").setCustomValidity(blank ? "Write something to send." : "");
        if ($("prompt-form").reportValidity()) this.send();
      });
      addEventListener("pagehide", () => this.stop());
    }

    // Fit the box to the served model: whether it chats, how long its context is, and the sampling that its authors
    // recommend. `instead`: there is no model.
    fit({ chats, sampling = {}, context = Infinity, instead }) {
      this.context = context;
      this.random = instead ? " There is no model, so its words are drawn at random." : "";
      $("mode-field").hidden = !chats;
      if (this.fitted !== chats) this.setMode(chats ? "chat" : "text");
      this.fitted = chats;
      for (const [field, name] of Object.entries(NUMBERS)) {
        if (name in USUAL) $(field).placeholder = String(sampling[name] ?? USUAL[name]);
      }
      // Greedy unless the authors say otherwise, because small chat models often answer nonsense at temperature 1.
      const greedy = chats && sampling.temperature === undefined;
      if ($("temperature").value === $("temperature").defaultValue) $("temperature").value = greedy ? "0" : "";
      $("temperature").defaultValue = greedy ? "0" : "";
    }

    setMode(mode) {
      this.mode = mode;
      $("mode").value = mode;
      const usual = MODES[mode];
      const most = Math.min(usual.tokens, Math.floor(this.context / 2)); // the prompt needs some of the context
      for (const [id, value] of [["prompt", usual.example], ["tokens", String(most)]]) {
        const box = $(id), untouched = box.value === box.defaultValue;
        box.defaultValue = value;
        if (untouched) box.value = value;
      }
      EB.put("prompt-label", usual.label);
      $("prompt").title = usual.hint;
      $("playground").classList.toggle("chat", mode === "chat");
      $("scored").checked = mode === "text"; // an answer of scored tokens is not set as Markdown
      // One reads a chat downwards, so its box is below the answers; moved, so that the keyboard meets both in this order.
      $("conversation")[mode === "chat" ? "after" : "before"]($("prompt-form"));
      this.restart();
    }

    restart() {
      this.stop();
      this.control = null;
      this.busy(false);
      this.turns = [];
      this.last = null;
      this.answer.clear();
      this.answer.box.classList.add("none");
      this.answer.box.textContent = `The answer appears here, token by token.${this.random}`;
      $("regenerate").hidden = true;
      $("answer-facts").hidden = true;
      $("new-chat").hidden = true;
      EB.showError("answer-error", "");
    }

    stop() {
      this.control?.abort();
    }

    // The route and the body of a request for the text in the box.
    request(text) {
      const options = { max_tokens: Number($("tokens").value) || 60, stream: $("stream").checked };
      for (const [field, name] of Object.entries(NUMBERS)) {
        if ($(field).value.trim() !== "") options[name] = Number($(field).value);
      }
      const stops = $("stops").value.split("\n").filter(Boolean).map((line) => line.replace(/\\n/g, "\n"));
      if (stops.length) options.stop = stops;
      if (options.stream) options.stream_options = { include_usage: true, continuous_usage_stats: true };
      const scored = $("scored").checked;
      if (this.mode === "text") return ["v1/completions", { prompt: text, ...(scored && { logprobs: ALTERNATIVES }), ...options }];
      const messages = [...this.turns, { role: "user", content: text }];
      return ["v1/chat/completions", { messages, ...(scored && { logprobs: true, top_logprobs: ALTERNATIVES }), ...options }];
    }

    // Ask the last question of a chat again, in place of its answer.
    regenerate() {
      if (this.control || !this.last) return;
      const asked = this.turns.at(-2).content;
      this.turns.splice(-2);
      for (const place of this.last) place.remove();
      this.send(asked);
    }

    async send(again = null) {
      const text = again ?? $("prompt").value;
      const [path, body] = this.request(text);
      // The box is free for the next message at once. What is typed there while this answer comes is kept.
      if (this.mode === "chat" && again === null) $("prompt").value = $("prompt").defaultValue = "";
      const control = (this.control = new AbortController());
      this.id = `page-${Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("")}`;
      this.busy(true);
      const places = this.place(text);
      const clock = new Stopwatch();
      this.sent(this.id);
      let said = "", problem = "";
      try {
        const reply = await fetch(path, {
          method: "POST", signal: control.signal, body: JSON.stringify(body),
          headers: this.headers({ "Content-Type": "application/json", "X-Request-Id": this.id }),
        });
        if (!reply.ok) throw await EB.refusal(reply);
        for await (const piece of body.stream ? EB.events(reply) : [await reply.json()]) {
          if (piece.error) throw new Error(piece.error.message);
          said += this.take(piece, clock, body.stream);
        }
      } catch (error) {
        if (!control.signal.aborted) problem = error instanceof TypeError ? "the server cannot be reached" : error.message;
      }
      if (control !== this.control) return; // a new chat has begun
      clock.stopped = control.signal.aborted;
      await this.finish(text, said, problem, places);
      if (control !== this.control) return;
      this.control = null;
      if (!problem) this.showFacts(clock);
      this.busy(false);
    }

    busy(is) {
      $("send").disabled = is;
      $("send").title = is ? "an answer is being written: wait, or stop it" : "";
      $("regenerate").disabled = is;
      $("cancel").disabled = !is;
      $("cancel").title = is ? "" : "no answer is being written";
      if (is) {
        EB.showError("answer-error", "");
        $("answer-facts").hidden = true;
      }
    }

    // Show the text that was sent, and make a place for the answer; return the two elements.
    place(text) {
      if (this.mode === "text" || !this.turns.length) this.answer.clear();
      const own = this.answer.begin(this.mode === "chat" ? "user" : "prompt");
      own.textContent = text;
      const places = [own, this.answer.begin(this.mode === "chat" ? "model" : "rest")];
      this.answer.toEnd();
      return places;
    }

    // Show a piece of the answer; return its text.
    take(piece, clock, streamed) {
      const [choice] = piece.choices ?? [];
      const said = choice?.delta ?? choice?.message;
      const [text, thought] = [said?.content ?? choice?.text ?? "", said?.reasoning_content ?? ""];
      if (thought) this.answer.think(thought);
      if (choice && (text || !thought)) this.answer.add(text, EB.scoresOf(choice));
      clock.note(text || thought, piece, streamed);
      if (clock.tokens) this.showFacts(clock);
      return text;
    }

    // Keep the turns of a chat, and set the answer as Markdown. A message without an answer goes back into the box.
    async finish(text, said, problem, places) {
      EB.showError("answer-error", problem);
      this.said = said;
      if (this.mode !== "chat") return;
      if (said) {
        this.turns.push({ role: "user", content: text }, { role: "assistant", content: said });
        this.last = places;
        if (!$("scored").checked) await this.setMarkdown(places[1], said);
      } else {
        for (const place of places) place.remove();
        const box = $("prompt");
        box.value = box.value ? `${text}\n${box.value}` : text;
      }
      $("new-chat").hidden = !this.turns.length;
      $("regenerate").hidden = !said;
    }

    // The server turns Markdown into HTML in which all HTML of the text is escaped. Without it the text stays as it is.
    async setMarkdown(place, text) {
      try {
        const reply = await fetch("web/markdown", { method: "POST", body: text, headers: this.headers({ "Content-Type": "text/markdown" }) });
        if (!reply.ok) return;
        const thoughts = place.querySelectorAll(".thought");
        place.replaceChildren(...thoughts, ...new DOMParser().parseFromString(await reply.text(), "text/html").body.childNodes);
        place.classList.add("markdown");
        for (const link of place.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noreferrer" });
        this.answer.toEnd();
      } catch {
        // the banner reports that the server is gone
      }
    }

    showFacts(clock) {
      EB.put("answer-timing", clock.words());
      $("answer-facts").hidden = false;
    }
  }

  // How long an answer took, as this page sees it.
  class Stopwatch {
    constructor() {
      this.began = this.last = performance.now();
      this.first = null; // when the first text of a stream came, in milliseconds
      this.tokens = this.tokensAtFirst = 0;
      this.ended = "";
      this.stopped = false;
    }

    note(text, piece, streamed) {
      const now = performance.now();
      if (piece.choices?.length) this.last = now;
      if (piece.usage) this.tokens = piece.usage.completion_tokens;
      if (streamed && text && this.first === null) {
        this.first = now;
        this.tokensAtFirst = this.tokens;
      }
      const [choice] = piece.choices ?? [];
      if (choice?.finish_reason === "length") this.ended = "ended at its limit";
      else if (typeof choice?.stop_reason === "string") this.ended = `ended at “${choice.stop_reason}”`;
      else if (choice?.finish_reason) this.ended = "ended by itself";
    }

    words() {
      const { counted, seconds, figure } = EB;
      const total = (this.last - this.began) / 1000;
      const words = [`${counted(this.tokens, "token")} in ${seconds(total)}`];
      // The rate of a stream is that of the tokens after those of its first piece.
      const after = this.first === null ? total : (this.last - this.first) / 1000;
      const later = this.tokens - this.tokensAtFirst;
      if (this.first !== null) words.unshift(`first token after ${seconds((this.first - this.began) / 1000)}, as seen by this page`);
      if (later > 0 && after > 0) words.push(`${figure(later / after)} tokens/s${this.first === null ? "" : " after the first token"}`);
      if (this.stopped || this.ended) words.push(this.stopped ? "stopped" : this.ended);
      return words.join(" · ");
    }
  }

  Object.assign(EB, { Playground });
})(globalThis);
