// Plays the frames of a decode. Every text goes into the page as textContent; nothing is ever parsed as markup.
"use strict";

const trace = JSON.parse(document.getElementById("data").textContent);
const MASK = "░";
const KINDS = {
  prefill: "prefill", full: "full step", sub: "sub-block step", commit: "commit", reused: "no forward",
  draft: "draft", verify: "verification",
};
const FIGURES = [
  ["tokens", "tokens", null],
  ["forwards", "forwards", null],
  ["attention, positions x layers", "attention_run", "attention_reused"],
  ["MLP, positions x layers", "mlp_run", "mlp_reused"],
];

const byId = (id) => document.getElementById(id);
const slider = byId("slider");
let panels = [];
let timer = null;

function make(tag, className, parent, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function parseRows(text) {
  const rows = new Set();
  if (text === "none") return rows;
  for (const range of text.split(",")) {
    const [first, last = first] = range.split("-").map(Number);
    for (let row = first; row <= last; row++) rows.add(row);
  }
  return rows;
}

function tokenText(id) {
  const text = trace.texts[id];
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return shown.trim() === "" ? "␣".repeat(Math.max(shown.length, 1)) : shown;
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// One run of one sample: its block with the grid beside it, its totals and its text.
class Panel {
  constructor(run, name, sample, largest) {
    this.run = run;
    this.sample = sample;
    this.largest = largest;
    this.root = make("section", "run", byId("runs"));
    make("h2", "", this.root, run.saved ? `${name} · ${plural(run.saved, "position")} saved` : name);
    this.status = make("p", "status", this.root);
    this.buildBlock();
    this.reading = make("p", "reading", this.root);
    this.buildTotals();
    this.buildText();
    this.branches = make("div", "branches", this.root);
  }

  buildBlock() {
    this.block = make("div", "block", this.root);
    this.block.setAttribute("role", "img");
    const axis = make("div", "block-line axis", this.block);
    make("span", "number", axis, "position");
    make("span", "token", axis, "token");
    make("span", "confidence", axis, "layer");
    const numbers = make("span", "cells", axis);
    const every = trace.layers > 40 ? 8 : 4;
    for (let layer = 0; layer < trace.layers; layer++) {
      make("span", "cell", numbers, layer % every ? "" : String(layer));
    }
    const longest = Math.max(trace.block_size, ...this.run.frames.map((frame) => frame.tokens.length));
    this.lines = Array.from({ length: longest }, (_, row) => this.buildLine(row));
    this.block.addEventListener("mouseover", (event) => this.read(event.target));
    this.block.addEventListener("click", (event) => this.read(event.target));
  }

  buildLine(row) {
    const root = make("div", "block-line", this.block);
    const number = make("span", "number", root, String(row));
    const token = make("span", "token", root);
    const confidence = make("span", "confidence", root);
    const grid = make("span", "cells", root);
    const cells = Array.from({ length: trace.layers }, (_, layer) => {
      const cell = make("i", "cell", grid);
      cell.dataset.row = row;
      cell.dataset.layer = layer;
      return cell;
    });
    return { root, number, token, confidence, cells };
  }

  buildText() {
    this.text = make("div", "text", this.root);
    this.text.tabIndex = 0;
    this.text.setAttribute("aria-label", "text so far");
    for (const id of this.sample.prompt) make("span", "given", this.text, trace.texts[id]);
    const knownAt = new Map();
    this.run.frames.forEach((frame, place) => frame.positions.forEach((each) => knownAt.set(each, place)));
    this.words = this.run.ids.map((id, place) => {
      const position = this.sample.prompt.length + place;
      return { span: make("span", "", this.text), text: trace.texts[id], position, knownAt: knownAt.get(position) };
    });
  }

  buildTotals() {
    const list = make("dl", "totals", this.root);
    this.figures = FIGURES.map(([label, done, reused]) => {
      make("dt", "", list, label);
      const bar = make("div", "bar", list);
      return { done, reused, doneBar: make("i", "", bar), reusedBar: make("i", "", bar), value: make("dd", "", list) };
    });
  }

  show(place) {
    const last = this.run.frames.length - 1;
    if (last < 0) {
      this.status.textContent = "Nothing was decoded.";
      return;
    }
    this.place = Math.min(place, last);
    this.frame = this.run.frames[this.place];
    this.layers = this.frame.layers.map(([first, end, ...rows]) => [first, end, ...rows.map(parseRows)]);
    this.showStatus(place > last);
    this.showLines();
    this.showText();
    this.showBranches();
    this.showTotals();
    this.reading.textContent = "";
  }

  showStatus(isOver) {
    const frame = this.frame;
    const parts = [KINDS[frame.kind]];
    if (frame.kind === "prefill") {
      parts.push(`positions ${frame.start} to ${frame.start + frame.rows - 1} in every layer`);
    } else {
      const found = frame.kind === "commit" ? "next block's first token" : parseRows(frame.unmasked).size;
      parts.push(`block at position ${frame.start}`, plural(frame.rows, "position"), `unmasked: ${found}`);
    }
    if (isOver) parts.unshift(`finished (${this.run.finish})`);
    this.status.textContent = parts.join(" · ");
    this.block.setAttribute("aria-label", `positions and layers: ${parts.join(", ")}`);
  }

  showLines() {
    const frame = this.frame;
    const changed = parseRows(frame.changed);
    const unmasked = parseRows(frame.unmasked);
    const framed = parseRows(frame.sub_block);
    this.hidden = parseRows(frame.hidden);
    this.accepted = parseRows(frame.accepted);
    this.rejected = parseRows(frame.rejected);
    const proposals = new Map(frame.proposals.map(([row, token, confidence]) => [row, { token, confidence }]));
    this.lines.forEach((line, row) => {
      const classes = line.root.classList;
      classes.toggle("framed", framed.has(row));
      classes.toggle("frame-first", framed.has(row) && !framed.has(row - 1));
      classes.toggle("frame-last", framed.has(row) && !framed.has(row + 1));
      classes.toggle("changed", changed.has(row));
      classes.toggle("hidden-row", this.hidden.has(row));
      this.showToken(line, row, proposals.get(row), unmasked.has(row));
      line.cells.forEach((cell, layer) => (cell.className = `cell ${this.stateOf(row, layer).name}`));
    });
  }

  showToken(line, row, proposal, isFresh) {
    const frame = this.frame;
    const id = frame.tokens[row];
    const position = frame.start + row;
    const isMasked = id === trace.mask_id && !isFresh;
    // a verification writes its own token where the draft is wrong; drafts after that one are struck out
    const shown = (id === trace.mask_id || isFresh) && proposal ? proposal.token : id;
    const names = ["token"];
    if (isMasked) names.push("masked");
    if (isFresh) names.push("fresh");
    if (this.accepted.has(row)) names.push("accepted");
    if (this.rejected.has(row)) names.push(isFresh ? "corrected" : "rejected");
    if (position < this.sample.prompt.length) names.push("given");
    if (this.isApart(position) && !isMasked) names.push("apart");
    line.token.className = names.join(" ");
    line.token.style.setProperty("--confidence", isMasked && proposal ? proposal.confidence : 0);
    const isEmpty = id === undefined || (isMasked && !proposal);
    line.token.textContent = id === undefined ? "" : isEmpty ? MASK.repeat(3) : tokenText(shown);
    line.token.title = isEmpty ? "" : trace.texts[shown];
    line.confidence.textContent = proposal ? proposal.confidence.toFixed(2) : "";
  }

  // What a layer did for a row: the plan's rows, and the one word that the square is coloured by.
  stateOf(row, layer) {
    const found = this.layers.find(([first, end]) => first <= layer && layer < end);
    const [carried, attention, keys, mlp] = found ? found.slice(2).map((rows) => rows.has(row)) : [];
    let name = this.hidden.has(row) ? "absent" : "skipped";
    if (attention && mlp) name = "computed";
    else if (attention || mlp) name = "partly";
    else if (carried) name = "reused";
    else if (keys) name = "keys";
    return { name, carried, attention, keys, mlp };
  }

  read(target) {
    if (target.dataset.row === undefined || !this.frame) return;
    const [row, layer] = [Number(target.dataset.row), Number(target.dataset.layer)];
    const { name, carried, attention, keys, mlp } = this.stateOf(row, layer);
    const part = (runs) => (runs ? "computed" : carried ? "delta reused" : "not needed");
    const detail = `attention ${part(attention)}, MLP ${part(mlp)}, keys and values ${keys ? "written" : "kept"}`;
    const changed = parseRows(this.frame.changed).has(row) ? ", changed" : "";
    const done = { skipped: "skipped", absent: "not there yet: neither computed nor attended to" }[name] ?? detail;
    this.reading.textContent = `position ${row}${changed}, layer ${layer}: ${done}`;
  }

  showText() {
    const known = (word) => word.knownAt !== undefined && word.knownAt <= this.place;
    const end = this.words.findLastIndex(known);
    this.words.forEach((word, place) => {
      const isKnown = known(word);
      const names = [isKnown ? (word.knownAt === this.place ? "fresh" : "known") : "gap"];
      if (isKnown && this.isApart(word.position)) names.push("apart");
      word.span.className = names.join(" ");
      word.span.textContent = isKnown ? word.text : MASK;
      word.span.hidden = place > end;
    });
    this.text.scrollTop = this.text.scrollHeight;
  }

  // A lane under the text for each number of drafted tokens that might have been accepted; the taken one is lit.
  showBranches() {
    this.branches.replaceChildren();
    for (const { accepted, tokens, is_taken: isTaken } of this.frame.branches) {
      const lane = make("div", isTaken ? "branch taken" : "branch", this.branches);
      make("span", "number", lane, `${accepted} accepted`);
      tokens.forEach((id) => make("span", "token", lane, tokenText(id)));
    }
  }

  showTotals() {
    for (const { done, reused, doneBar, reusedBar, value } of this.figures) {
      const totals = this.frame.totals;
      const whole = Math.max(this.largest[done] + (reused ? this.largest[reused] : 0), 1);
      doneBar.style.width = `${(100 * totals[done]) / whole}%`;
      reusedBar.style.width = reused ? `${(100 * totals[reused]) / whole}%` : "0";
      const more = reused && this.largest[reused] ? ` + ${totals[reused].toLocaleString("en")} reused` : "";
      value.textContent = totals[done].toLocaleString("en") + more;
    }
  }

  isApart(position) {
    return this.sample.difference !== null && this.sample.difference.position === position;
  }
}

function largestTotals(runs) {
  const finals = runs.filter((run) => run.frames.length).map((run) => run.frames.at(-1).totals);
  const names = FIGURES.flatMap(([, done, reused]) => (reused ? [done, reused] : [done]));
  return Object.fromEntries(names.map((name) => [name, Math.max(0, ...finals.map((totals) => totals[name]))]));
}

function chooseSample(index) {
  pause();
  const sample = trace.samples[index];
  byId("runs").replaceChildren();
  const largest = largestTotals(sample.runs);
  panels = sample.runs.map((run, place) => new Panel(run, trace.engines[place], sample, largest));
  slider.max = Math.max(0, ...sample.runs.map((run) => run.frames.length - 1));
  showDifference(sample);
  go(0);
}

function showDifference(sample) {
  const button = byId("difference");
  button.hidden = sample.runs.length < 2;
  byId("marks").replaceChildren();
  button.disabled = sample.difference === null;
  button.textContent = "The texts are equal";
  if (sample.difference === null) return;
  button.textContent = `First difference: step ${sample.difference.frame + 1}`;
  button.onclick = () => go(sample.difference.frame);
  make("option", "", byId("marks")).value = sample.difference.frame;
}

function go(place) {
  slider.value = place;
  const shown = Number(slider.value);
  byId("place").textContent = `step ${shown + 1} of ${Number(slider.max) + 1}`;
  panels.forEach((panel) => panel.show(shown));
  if (shown >= Number(slider.max)) pause();
}

function pause() {
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "Play";
}

function play() {
  if (Number(slider.value) >= Number(slider.max)) go(0);
  timer = setInterval(() => go(Number(slider.value) + 1), Number(byId("speed").value));
  byId("play").textContent = "Pause";
}

const actions = {
  first: () => go(0),
  back: () => go(Number(slider.value) - 1),
  forward: () => go(Number(slider.value) + 1),
  last: () => go(Number(slider.max)),
  play: () => (timer === null ? play() : pause()),
};
const keys = { ArrowLeft: "back", ArrowRight: "forward", Home: "first", End: "last", " ": "play" };

for (const [name, act] of Object.entries(actions)) byId(name).addEventListener("click", act);
slider.addEventListener("input", () => go(Number(slider.value)));
byId("speed").addEventListener("change", () => {
  if (timer !== null) {
    pause();
    play();
  }
});
byId("sample").addEventListener("change", (event) => chooseSample(Number(event.target.value)));
document.addEventListener("keydown", (event) => {
  const name = keys[event.key];
  const isTheirs = event.target.tagName === "SELECT" || (event.key === " " && event.target.tagName === "BUTTON");
  if (!name || isTheirs || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  actions[name]();
});

document.title = `stepsaver trace: ${trace.model}`;
byId("about").textContent = `${trace.model}, ${plural(trace.layers, "layer")}, decoded by ${trace.policy}`;
byId("sample-choice").hidden = trace.samples.length < 2;
trace.samples.forEach((sample, place) => {
  const opening = sample.prompt.map((id) => trace.texts[id]).join("").trim().slice(0, 40);
  make("option", "", byId("sample"), `${place + 1}: ${opening}`).value = place;
});
if (trace.samples.length) {
  const asked = Number(/sample=(\d+)/.exec(location.hash)?.[1] ?? 1); // how a report's sample browser leads here
  byId("sample").value = Math.max(1, Math.min(asked, trace.samples.length)) - 1;
  chooseSample(Number(byId("sample").value));
}
