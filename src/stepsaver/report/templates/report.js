// Turns the report's blocks into elements. Every text goes into the page as textContent; nothing is parsed as markup.
"use strict";

const report = JSON.parse(document.getElementById("data").textContent);
const TONES = {
  confirmed: "good", rejected: "bad", undecided: "open", disturbed: "open", invalid: "bad", failed: "bad", running: "open",
  incomplete: "open", missing: "open", right: "good", wrong: "bad",
};
const byId = (id) => document.getElementById(id);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 760px)");
const plots = new Map(); // element -> figure, of the tab that is shown
const drawable = new Promise((isThere) => document.addEventListener("DOMContentLoaded", isThere)); // plotly comes last
let samples = null;

function make(tag, className, parent, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

const badge = (parent, text) => make("span", `badge ${TONES[text] || ""}`, parent, text);

// --- figures

// The parts of a layout that follow the page's theme and width.
function themed(figure) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const layout = structuredClone(figure.layout);
  layout.height = figure.height + (narrow.matches && figure.data.length > 1 ? 12 * figure.data.length : 0); // a longer legend
  layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
  layout.font = { color: colour("--ink"), family: "system-ui, sans-serif", size: narrow.matches ? 11 : 13 };
  layout.hoverlabel = { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") }, align: "left" };
  layout.dragmode = narrow.matches ? false : "zoom"; // on a telephone a finger scrolls the page
  for (const axis of [layout.xaxis, layout.yaxis]) {
    Object.assign(axis, { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") });
  }
  return layout;
}

function draw(element, figure) {
  const layout = themed(figure);
  element.style.height = `${layout.height}px`;
  plots.set(element, figure);
  return Plotly.react(element, figure.data, layout, { displayModeBar: false, responsive: true });
}

const redraw = () => plots.forEach((figure, element) => draw(element, figure));
dark.addEventListener("change", redraw);
narrow.addEventListener("change", redraw);

// --- blocks

function buildTable(block, root) {
  const numeric = block.columns.map((_, place) => block.rows.some((row) => typeof row[place].value === "number"));
  const table = make("table", "", make("div", "scroll", root));
  const head = make("tr", "", make("thead", "", table));
  const body = make("tbody", "", table);
  const heads = block.columns.map((name, place) => {
    const cell = make("th", numeric[place] ? "" : "words", head);
    cell.scope = "col";
    const button = make("button", "", cell, name);
    button.type = "button";
    button.addEventListener("click", () => {
      const isAscending = cell.getAttribute("aria-sort") !== "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
      fillTable(body, sorted(block.rows, place, isAscending), numeric);
    });
    return cell;
  });
  fillTable(body, block.rows, numeric);
}

function fillTable(body, rows, numeric) {
  body.replaceChildren();
  for (const row of rows) {
    const line = make("tr", "", body);
    row.forEach((cell, place) => {
      const element = make("td", `${numeric[place] ? "" : "words"} ${cell.tone || ""}`.trim(), line, cell.text);
      if (cell.small) make("span", "small", element, cell.small);
    });
  }
}

// Cells without a value stay at the end, whichever way the others go.
function sorted(rows, place, isAscending) {
  const key = (row) => row[place].value ?? null;
  const compare = (one, other) => (typeof one === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true }));
  const filled = rows.filter((row) => key(row) !== null).sort((one, other) => compare(key(one), key(other)));
  return [...(isAscending ? filled : filled.reverse()), ...rows.filter((row) => key(row) === null)];
}

const builders = {
  figure(block, root) {
    const element = make("div", "plot", root);
    element.dataset.name = block.name;
    return () => draw(element, block.figure);
  },
  table: buildTable,
  notes(block, root) {
    const list = make("ul", "notes", root);
    for (const item of block.items) {
      const line = make("li", "", list);
      badge(line, item.level);
      make("span", "", line, item.text);
    }
    if (!block.items.length) make("p", "small", root, block.nothing);
  },
  facts(block, root) {
    const list = make("dl", "facts", root);
    for (const [name, value] of block.items) {
      make("dt", "", list, name);
      make("dd", "", list, value);
    }
  },
  samples(block, root) {
    const place = make("p", "small", root, "Unpacking the samples …");
    return () =>
      unpacked().then(
        (all) => {
          place.remove();
          new Browser(all[block.tab], root);
        },
        () => (place.textContent = "This browser cannot unpack the samples; a newer one can (DecompressionStream)."),
      );
  },
};

function showTab(index) {
  const tab = report.tabs[index];
  const main = byId("main");
  plots.forEach((_, element) => Plotly.purge(element));
  plots.clear();
  main.replaceChildren();
  document.querySelectorAll("[role=tab]").forEach((each, place) => each.setAttribute("aria-selected", place === index));
  if (tab.sentence) {
    const verdict = make("p", "verdict", main);
    const [word] = /^\w*/.exec(tab.sentence);
    make("strong", TONES[tab.outcome] || "", verdict, word);
    verdict.append(tab.sentence.slice(word.length));
  }
  const grid = make("div", "blocks", main);
  const later = [];
  for (const block of tab.blocks) {
    const root = make(block.folded ? "details" : "section", block.half ? "block half" : "block", grid);
    root.dataset.block = block.name || block.kind;
    make("h2", "", block.folded ? make("summary", "", root) : root, block.title);
    const finish = builders[block.kind](block, root);
    if (finish) later.push(finish);
    if (block.caption) make("p", "caption", root, block.caption);
  }
  return inTurn(later, grid);
}

// Draws one thing after the other, now that every element has its width; the reader sees the first at once.
async function inTurn(later, grid) {
  await drawable;
  for (const finish of later) {
    if (!grid.isConnected) return; // another tab is shown by now
    await finish();
    await new Promise((painted) => setTimeout(painted));
  }
}

// --- samples

async function unpacked() {
  if (samples === null) {
    const letters = atob(byId("samples").textContent);
    const bytes = new Uint8Array(letters.length);
    for (let place = 0; place < letters.length; place++) bytes[place] = letters.charCodeAt(place);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    samples = JSON.parse(await new Response(stream).text());
  }
  return samples;
}

// Where two texts part: the common beginning, the first word that differs, and the rest of each.
function parting(one, other) {
  let same = 0;
  while (same < one.length && same < other.length && one[same] === other[same]) same++;
  while (same > 0 && /\S/.test(one[same - 1])) same--; // from the word's beginning
  return same;
}

const isRight = (mark) => mark !== null && mark !== undefined && mark >= 1;
const SHOWN = [
  ["all samples", () => true],
  ["answers differ", (left, right) => left.answer !== right.answer],
  ["right on the left, wrong on the right", (left, right) => isRight(left.mark) && right.mark !== null && !isRight(right.mark)],
  ["wrong on the left, right on the right", (left, right) => left.mark !== null && !isRight(left.mark) && isRight(right.mark)],
];

// Two configs' answers to one question at a time.
class Browser {
  constructor(data, root) {
    this.data = data;
    for (const note of data.notes) make("p", "small", root, note);
    if (!data.configs.length) return;
    this.root = root;
    const controls = make("div", "browser-controls", root);
    const names = data.configs.map((config) => config.name);
    this.left = this.choice(controls, "Left ", names, 0);
    this.right = this.choice(controls, "Right ", names, this.otherThanFirst());
    this.filter = this.choice(controls, "Show ", SHOWN.map(([name]) => name), 0);
    this.back = this.button(controls, "‹", "previous sample", () => this.go(this.place - 1));
    this.number = make("input", "", controls);
    Object.assign(this.number, { type: "number", min: 1, ariaLabel: "sample" });
    this.number.addEventListener("change", () => this.go(Number(this.number.value) - 1));
    this.forward = this.button(controls, "›", "next sample", () => this.go(this.place + 1));
    this.count = make("span", "small", controls);
    this.shown = make("div", "sample", root);
    this.choose();
  }

  // The right side opens with a config whose answers are not all the left one's.
  otherThanFirst() {
    const [first, ...rest] = this.data.configs;
    const place = rest.findIndex((config) => config.answers.some((answer, at) => answer !== first.answers[at]));
    return place >= 0 ? place + 1 : Math.min(1, rest.length);
  }

  choice(parent, label, names, chosen) {
    const select = make("select", "", make("label", "", parent, label));
    names.forEach((name, place) => (make("option", "", select, name).value = place));
    select.value = chosen;
    select.addEventListener("change", () => this.choose());
    return select;
  }

  button(parent, text, label, act) {
    const button = make("button", "", parent, text);
    button.type = "button";
    button.ariaLabel = label;
    button.addEventListener("click", act);
    return button;
  }

  side(select, sample) {
    const config = this.data.configs[Number(select.value)];
    return { name: config.name, answer: config.answers[sample], mark: config.marks[sample] };
  }

  choose() {
    const fits = SHOWN[Number(this.filter.value)][1];
    const all = this.data.documents.map((_, sample) => sample);
    this.chosen = all.filter((sample) => fits(this.side(this.left, sample), this.side(this.right, sample)));
    this.go(0);
  }

  go(place) {
    this.place = Math.max(0, Math.min(place || 0, this.chosen.length - 1));
    this.back.disabled = this.place === 0;
    this.forward.disabled = this.place >= this.chosen.length - 1;
    this.number.value = this.chosen.length ? this.place + 1 : 0;
    this.count.textContent = `of ${this.chosen.length.toLocaleString("en")}`;
    this.shown.replaceChildren();
    if (this.chosen.length) this.showSample(this.chosen[this.place]);
    else make("p", "small", this.shown, "No sample is like that.");
  }

  showSample(sample) {
    const [question, target, subject] = this.data.documents[sample];
    const name = `Document ${this.data.names[sample]}`;
    make("p", "small", this.shown, subject ? `${name} · ${subject}` : name);
    if (question !== null) make("div", "question", this.shown, question);
    if (target) make("p", "", this.shown, `Expected: ${target}`);
    const pair = make("div", "answers", this.shown);
    const sides = [this.side(this.left, sample), this.side(this.right, sample)];
    const texts = sides.map(({ answer }) => (answer === null ? null : this.data.texts[answer]));
    const isSame = texts[0] === texts[1];
    const same = isSame || texts.includes(null) ? null : parting(...texts);
    sides.forEach((side, place) => this.showAnswer(pair, side, texts[place], same));
    if (isSame && texts[0] !== null) make("p", "small", this.shown, "Both answers are equal.");
    this.showTrace(sample);
  }

  showAnswer(parent, { name, mark }, text, same) {
    const part = make("div", "", parent);
    const head = make("div", "answer-head", part);
    make("strong", "", head, name);
    if (mark !== null) badge(head, isRight(mark) ? "right" : mark > 0 ? `${Math.round(100 * mark)} % right` : "wrong");
    const answer = make("div", "answer", part);
    if (text === null) answer.textContent = "no answer stored";
    else if (same === null) answer.textContent = text;
    else {
      const [word] = /^\S*\s?/.exec(text.slice(same));
      answer.append(text.slice(0, same));
      make("mark", "", answer, word || " ").title = "the first difference";
      answer.append(text.slice(same + word.length));
    }
  }

  showTrace(sample) {
    const traces = this.data.traces;
    const position = traces?.positions[sample];
    if (position === undefined) return;
    const link = make("a", "", make("p", "", this.shown), `Play this sample step by step: ${traces.label}`);
    link.href = `${traces.file}#sample=${position + 1}`;
  }
}

// --- the page

document.title = `stepsaver: ${report.title}`;
byId("title").textContent = report.title;
byId("lead").textContent = report.lead;
byId("about").textContent = report.about;
if (report.tabs.length > 1) {
  report.tabs.forEach((tab, place) => {
    const button = make("button", "", byId("tabs"), tab.name);
    button.type = "button";
    button.setAttribute("role", "tab");
    button.addEventListener("click", () => showTab(place));
  });
}
window.shown = showTab(0);
