"use strict";
// The conversation: what the user types, what the server streams, and with which parameters. It shares with the
// engine's picture `page.authorized` (headers), `page.events` (a reader of server-sent events) and `page.mine`.
const page = (() => {
  const $ = (id) => document.getElementById(id);
  const log = $("log"), prompt = $("prompt");
  const messages = [];
  let model = null, running = null;

  const remembered = (id) => { try { return sessionStorage.getItem(id); } catch { return null; } };
  const remember = (id, value) => { try { sessionStorage.setItem(id, value); } catch { /* private windows */ } };

  function authorized(more = {}) {
    const key = $("key").value.trim();
    return key ? { ...more, authorization: `Bearer ${key}` } : more;
  }

  // The data of each event of a streamed answer, as it comes.
  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let waiting = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (waiting + value).split("\n\n");
      waiting = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        if (part === "data: [DONE]") return;
        yield JSON.parse(part.slice(6));
      }
    }
  }

  async function failure(response) {
    try { return (await response.json()).error.message; } catch { return `The server answered ${response.status}.`; }
  }

  async function connect() {
    try {
      const response = await fetch("v1/models", { headers: authorized() });
      if (response.status === 401) {
        $("model").textContent = "this server asks for an API key";
        $("settings").open = true;
        $("key").focus();
        return;
      }
      model = (await response.json()).data[0];
      $("model").textContent = `${model.id} · up to ${model.max_model_len.toLocaleString("en")} tokens`;
      $("max_tokens").max = model.max_model_len;
      if (Number($("max_tokens").value) > model.max_model_len / 2) $("max_tokens").value = Math.floor(model.max_model_len / 2);
      document.dispatchEvent(new Event("connected"));
    } catch {
      $("model").textContent = "the server does not answer";
    }
  }

  function parameters() {
    const body = {
      model: model ? model.id : "",
      temperature: Number($("temperature").value),
      top_p: Number($("top_p").value),
      max_tokens: Number($("max_tokens").value) || 256,
      repetition_penalty: Number($("repetition_penalty").value) || 1,
    };
    if ($("seed").value !== "") body.seed = Number($("seed").value);
    if ($("stop_string").value !== "") body.stop = $("stop_string").value;
    return body;
  }

  function bubble(kind, text) {
    const item = document.createElement("li");
    item.className = kind;
    item.innerHTML = '<span class="who"></span><div class="text"></div><p class="about"></p>';
    item.children[0].textContent = kind === "user" ? "You" : model ? model.id : "Model";
    item.children[1].textContent = text;
    log.append(item);
    log.scrollTop = log.scrollHeight;
    $("welcome").hidden = true;
    return item;
  }

  // A model without a chat template continues plain text instead; the server says so with a 400, once.
  let plain = false;
  async function post(signal) {
    const common = { ...parameters(), stream: true, stream_options: { include_usage: true } };
    const system = $("system").value.trim();
    const turns = system ? [{ role: "system", content: system }, ...messages] : messages;
    const body = plain ? { ...common, prompt: messages.at(-1).content } : { ...common, messages: turns };
    const response = await fetch(plain ? "v1/completions" : "v1/chat/completions", {
      method: "POST", signal, headers: authorized({ "content-type": "application/json" }), body: JSON.stringify(body),
    });
    if (response.ok) return response;
    const reason = await failure(response);
    if (!plain && response.status === 400 && /chat template: this model has none/.test(reason)) {
      plain = true;
      return post(signal);
    }
    throw new Error(reason);
  }

  async function ask(text) {
    messages.push({ role: "user", content: text });
    bubble("user", text);
    const item = bubble("assistant growing", ""), out = item.children[1], about = item.children[2];
    running = new AbortController();
    $("send").hidden = true;
    $("stop").hidden = false;
    const began = performance.now();
    let answer = "", first = 0, usage = null, reason = "stopped by you";
    try {
      for await (const chunk of events(await post(running.signal))) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (!page.mine.has(chunk.id)) {
          page.mine.add(chunk.id);
          item.dataset.id = chunk.id;
        }
        usage = chunk.usage || usage;
        for (const choice of chunk.choices) {
          const piece = choice.delta ? choice.delta.content || "" : choice.text;
          if (piece && !first) first = performance.now();
          answer += piece;
          if (choice.finish_reason) reason = choice.finish_reason;
        }
        const near = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        out.textContent = answer;
        if (near) log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        item.classList.add("failed");
        out.textContent = answer ? `${answer}\n\n${error.message}` : error.message;
        reason = "failed";
      }
    }
    finish(item, { answer, usage, reason, began, first });
  }

  function finish(item, { answer, usage, reason, began, first }) {
    const seconds = (performance.now() - (first || began)) / 1000;
    const facts = [];
    if (usage) {
      facts.push(`${usage.completion_tokens} tokens`);
      if (usage.completion_tokens > 1 && seconds > 0) facts.push(`${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
    }
    if (first) facts.push(`first after ${Math.round(first - began)} ms`);
    const words = { stop: "", length: "cut at the limit" };
    facts.push(reason in words ? words[reason] : reason);
    item.children[2].textContent = facts.filter(Boolean).join(" · ");
    item.classList.remove("growing");
    if (answer) messages.push({ role: "assistant", content: answer });
    else messages.pop();
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
    prompt.focus();
  }

  function grow() {
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight + 2}px`;
  }

  function submit(text) {
    if (!text || running) return;
    prompt.value = "";
    grow();
    ask(text);
  }

  $("ask").addEventListener("submit", (event) => { event.preventDefault(); submit(prompt.value.trim()); });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit(prompt.value.trim());
    }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
  $("stop").addEventListener("click", () => running && running.abort());
  $("clear").addEventListener("click", () => {
    if (running) running.abort();
    messages.length = 0;
    log.replaceChildren();
    $("welcome").hidden = false;
    prompt.focus();
  });
  for (const button of document.querySelectorAll(".try")) {
    button.addEventListener("click", () => submit(button.textContent));
  }
  for (const output of document.querySelectorAll("output")) {
    const input = $(output.htmlFor.value);
    input.addEventListener("input", () => { output.textContent = input.value; });
  }
  for (const button of document.querySelectorAll(".views button")) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      for (const other of document.querySelectorAll(".views button")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      document.dispatchEvent(new Event("shown"));
    });
  }
  const themes = ["system", "light", "dark"];
  function paint(theme) {
    document.documentElement.dataset.theme = theme;
    $("theme-word").textContent = theme;
    remember("theme", theme);
    document.dispatchEvent(new Event("shown"));
  }
  $("theme").addEventListener("click", () => {
    paint(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]);
  });
  paint(themes.includes(remembered("theme")) ? remembered("theme") : "system");
  $("key").value = remembered("key") || "";
  $("key").addEventListener("change", () => { remember("key", $("key").value.trim()); connect(); });
  setTimeout(connect);

  return { authorized, events, parameters, failure, mine: new Set(), model: () => model };
})();
