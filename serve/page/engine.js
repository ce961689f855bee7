"use strict";
// The engine's picture, drawn from the frames of `/steps`: each frame holds the whole state, so one that was skipped
// leaves nothing wrong behind.
(() => {
  const $ = (id) => document.getElementById(id);
  const HISTORY = 240;
  const tenants = new Map(); // request id -> its element
  const colours = new Map(); // request id -> hue
  const steps = [];
  let shape = null, frame = null, nextHue = 0, rates = [];

  // Neighbouring requests get hues far apart: the golden angle never repeats.
  function hue(id) {
    if (!colours.has(id)) {
      colours.set(id, (215 + nextHue++ * 137.508) % 360);
      if (colours.size > 4000) colours.delete(colours.keys().next().value);
    }
    return colours.get(id);
  }
  const dark = () => getComputedStyle(document.documentElement).getPropertyValue("color-scheme").trim() === "dark"
    || (document.documentElement.dataset.theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  const colour = (id) => `oklch(${dark() ? 66 : 60}% 0.13 ${hue(id)})`;
  const isMine = (id) => page.mine.has(id) || page.mine.has(id.replace(/-\d+$/, ""));
  const ink = (name) => {
    const probe = $("last");
    probe.style.color = `var(${name})`;
    const value = getComputedStyle(probe).color;
    probe.style.color = "";
    return value;
  };
  const number = (value) => value.toLocaleString("en");

  // ---- rows --------------------------------------------------------------------------------------------------------

  function layout() {
    const box = $("rows"), columns = Math.min(8, shape.rows), width = box.clientWidth / columns;
    box.style.setProperty("--w", `${width}px`);
    box.style.height = `${Math.ceil(shape.rows / columns) * 34}px`;
    return (row) => `translate(${(row % columns) * width}px, ${Math.floor(row / columns) * 34}px)`;
  }

  function drawRows() {
    const place = layout(), box = $("rows");
    let cells = box.querySelectorAll(".cell");
    if (cells.length !== shape.rows) {
      box.replaceChildren(...Array.from({ length: shape.rows }, (_, row) => {
        const cell = document.createElement("div");
        cell.className = "cell";
        cell.textContent = row;
        return cell;
      }));
      tenants.clear();
      cells = box.querySelectorAll(".cell");
    }
    const padded = frame.bucket ? frame.bucket[0] : 0;
    const taken = new Set(Object.keys(frame.rows).map(Number));
    cells.forEach((cell, row) => {
      cell.style.transform = place(row);
      cell.classList.toggle("bucket", row < padded);
      cell.classList.toggle("padding", row < padded && !taken.has(row) && frame.running > 0);
    });
    drawTenants(place, box);
    const count = taken.size;
    box.setAttribute("aria-label", count ? `${count} of ${shape.rows} rows in use: ${[...taken].join(", ")}` : "No row is in use");
    box.dataset.used = [...taken].join(",");
    const room = `${count || "none"} of ${shape.rows} in use`;
    $("bucket").textContent = frame.bucket && count ? `${room}, bucket of ${padded} × ${number(frame.bucket[1])}` : room;
  }

  function drawTenants(place, box) {
    const seen = new Set();
    for (const [row, id] of Object.entries(frame.rows)) {
      seen.add(id);
      let tenant = tenants.get(id);
      if (!tenant) {
        tenant = document.createElement("div");
        tenant.className = "tenant";
        tenant.style.setProperty("--own", colour(id));
        tenant.style.transform = place(Number(row));
        tenants.set(id, tenant);
        box.append(tenant);
      }
      tenant.classList.toggle("yours", isMine(id));
      if (tenant.dataset.row !== undefined && tenant.dataset.row !== row) {
        tenant.classList.add("moved");
        box.dataset.moved = Number(box.dataset.moved || 0) + 1;
      }
      tenant.dataset.row = row;
      tenant.style.transform = place(Number(row));
      tenant.textContent = frame.tokens[row] ?? "";
      tenant.title = `row ${row}: ${id}`;
    }
    for (const [id, tenant] of tenants) {
      if (seen.has(id)) continue;
      tenant.remove();
      tenants.delete(id);
    }
    const own = [...document.querySelectorAll("#log [data-id]")].at(-1);
    if (own && !own.querySelector(".swatch")) {
      const id = [...seen].find((name) => name.startsWith(own.dataset.id));
      if (id) own.children[0].insertAdjacentHTML("afterbegin", '<i class="swatch"></i>');
      if (id) own.querySelector(".swatch").style.background = colour(id);
    }
  }

  function drawQueue() {
    const shown = Math.min(frame.waiting, 60), box = $("queue");
    box.replaceChildren();
    if (!frame.waiting) return;
    const word = document.createElement("span");
    word.textContent = `${number(frame.waiting)} waiting`;
    box.append(word, ...Array.from({ length: shown }, () => document.createElement("i")));
  }

  // ---- canvases ----------------------------------------------------------------------------------------------------

  function surface(id, height) {
    const canvas = $(id), ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    return [canvas, pen, width];
  }

  function drawBlocks() {
    const total = shape.blocks;
    if (!total || !$("blocks").clientWidth) return;
    const cell = total <= 256 ? 14 : total <= 1024 ? 10 : total <= 2500 ? 7 : total <= 6000 ? 5 : 3;
    const columns = Math.max(1, Math.floor($("blocks").clientWidth / cell));
    const [canvas, pen] = surface("blocks", Math.ceil(total / columns) * cell);
    const gap = cell > 4 ? 1 : 0;
    const square = (block) => pen.fillRect((block % columns) * cell, Math.floor(block / columns) * cell, cell - gap, cell - gap);
    pen.fillStyle = ink("--faint");
    for (let block = 0; block < total; block++) square(block);
    let used = 0;
    for (const [row, blocks] of Object.entries(frame.blocks)) {
      pen.fillStyle = frame.rows[row] ? colour(frame.rows[row]) : ink("--soft");
      blocks.forEach(square);
      used += blocks.length;
    }
    const words = `${number(total - frame.free_blocks)} of ${number(total)} in use, ${shape.block_size} tokens each`;
    $("blocks-text").textContent = words;
    canvas.setAttribute("aria-label", words);
    canvas.dataset.used = used;
  }

  function drawSteps() {
    if (!$("steps").clientWidth) return;
    const [canvas, pen, width] = surface("steps", 64);
    const bar = Math.max(2, Math.floor(width / 120)), room = Math.floor(width / bar);
    const shown = steps.slice(-room), most = Math.max(4, ...shown.map((step) => step.decode));
    const full = ink("--accent"), soft = ink("--soft");
    pen.strokeStyle = ink("--line");
    pen.beginPath();
    pen.moveTo(0, 63.5);
    pen.lineTo(width, 63.5);
    pen.stroke();
    shown.forEach((step, at) => {
      const height = Math.max(step.decode ? 2 : 0, (step.decode / most) * 52), x = at * bar, y = 63 - height;
      pen.fillStyle = full;
      pen.strokeStyle = soft;
      if (step.replayed) pen.fillRect(x, y, bar - 1, height);
      else if (step.decode) pen.strokeRect(x + 0.5, y + 0.5, bar - 2, height - 1);
      if (step.prefills) {
        pen.fillStyle = soft;
        pen.beginPath();
        pen.arc(x + bar / 2, 5, Math.min(3, 1 + step.prefills / 4), 0, 7);
        pen.fill();
      }
    });
    const last = steps.at(-1);
    canvas.setAttribute("aria-label", last ? `${steps.length} steps shown, the last is ${last.step}` : "No step yet");
  }

  function sentence(step) {
    const parts = [`#${step.step}`.padEnd(7)];
    if (step.prefills) parts.push(`prefill ${step.prefills}`);
    if (step.decode) parts.push(`decode ${step.decode} → ${step.bucket ? step.bucket[0] : step.decode} rows, ${step.replayed ? "replayed" : step.reason}`);
    for (const [src, dst] of step.moves) parts.push(`row ${src} → ${dst}`);
    if (step.preempted) parts.push(`preempted ${step.preempted}`);
    if (step.ended) parts.push(`${step.ended} ended`);
    parts.push(`${(step.us / 1000).toFixed(1)} ms`);
    return parts.join("  ");
  }

  function drawBuckets() {
    const most = Math.max(1, ...frame.buckets.map((one) => one[2] + one[3]));
    $("buckets").tBodies[0].replaceChildren(...frame.buckets.map(([rows, width, replayed, eager]) => {
      const line = document.createElement("tr");
      line.innerHTML = "<td></td><td><div class=bar><i></i><i></i></div></td><td></td>";
      line.children[0].textContent = rows ? `${rows} × ${number(width)}` : "no bucket";
      const [full, hollow] = line.querySelectorAll("i");
      full.style.width = `${(replayed / most) * 100}%`;
      hollow.style.width = `${(eager / most) * 100}%`;
      line.children[2].textContent = eager ? `${number(replayed)} replayed, ${number(eager)} eager` : `${number(replayed)}`;
      return line;
    }));
  }

  function drawFacts() {
    const now = performance.now();
    rates.push([now, frame.totals.tokens]);
    while (rates.length > 2 && now - rates[0][0] > 2000) rates.shift();
    const [since, before] = rates[0], seconds = (now - since) / 1000;
    const rate = frame.running && seconds > 0.2 ? (frame.totals.tokens - before) / seconds : 0;
    $("f-rate").textContent = rate < 10 ? rate.toFixed(1) : number(Math.round(rate));
    $("f-running").textContent = frame.running;
    $("f-waiting").textContent = number(frame.waiting);
    $("f-kv").textContent = shape.blocks ? `${((1 - frame.free_blocks / shape.blocks) * 100).toFixed(1)} %` : "–";
    const { decode_steps: decoded, replayed } = frame.totals;
    $("f-replay").textContent = decoded ? `${Math.floor((replayed / decoded) * 100)} %` : "–";
    $("f-moves").textContent = number(frame.totals.moves);
  }

  let asked = false;
  function draw() {
    if (asked || !frame || !shape) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      drawFacts();
      drawRows();
      drawQueue();
      drawBlocks();
      drawSteps();
      drawBuckets();
      if (steps.length) $("last").textContent = steps.slice(-4).reverse().map(sentence).join("\n");
    });
  }

  // ---- frames ------------------------------------------------------------------------------------------------------

  function say(text, bad = false) {
    $("state").textContent = text;
    $("state").classList.toggle("bad", bad);
  }

  async function watch() {
    const response = await fetch("steps", { headers: page.authorized() });
    if (!response.ok) throw Object.assign(new Error(await page.failure(response)), { final: response.status === 501 });
    say("");
    for await (const event of page.events(response)) {
      if (event.shape) { shape = event.shape; continue; }
      if (event.skipped) { say(`This page was slow: ${number(event.skipped)} pictures were skipped.`); continue; }
      frame = event;
      steps.push(...event.steps);
      if (steps.length > HISTORY) steps.splice(0, steps.length - HISTORY);
      draw();
    }
    throw new Error("The server ended the picture; trying again.");
  }

  async function keepWatching() {
    for (let wait = 1000; ; wait = Math.min(wait * 2, 15000)) {
      try {
        await watch();
      } catch (error) {
        say(error.name === "TypeError" ? "The server does not answer; trying again." : error.message, true);
        if (error.final) {
          $("engine").classList.add("silent");
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  $("load").addEventListener("submit", async (event) => {
    event.preventDefault();
    const model = page.model();
    if (!model) return;
    // Three HTTP requests of three prompts: a browser opens six connections to one host, and two are taken.
    const groups = [[24, ["rivers", "clocks", "bread"]], [64, ["maps", "trees", "bridges"]], [128, ["owls", "glass", "wool"]]];
    const answers = await Promise.allSettled(groups.map(([tokens, subjects]) => fetch("v1/completions", {
      method: "POST",
      headers: page.authorized({ "content-type": "application/json" }),
      body: JSON.stringify({
        model: model.id, prompt: subjects.map((subject) => `A short note about ${subject}:`),
        max_tokens: Math.min(tokens, model.max_model_len - 64), temperature: 0.8,
      }),
    })));
    const refused = answers.filter((answer) => answer.status === "rejected" || !answer.value.ok).length;
    if (refused) say(`${refused} of 3 batches were refused.`, true);
  });

  addEventListener("resize", draw);
  document.addEventListener("shown", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.addEventListener("connected", keepWatching, { once: true });
})();
