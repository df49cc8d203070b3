"use strict";
// One page over one or more runs. All text of a run is set as text, never as HTML: a model wrote it.

let DATA = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("view");
const OVERVIEW = ["reward/mean", "eval/score", "completions/mean_length", "entropy", "logprob_gap/mean", "grad_norm",
  "frac_reward_zero_std", "completions/clipped_ratio", "time/step"];
const OVERVIEW_FIT = ["loss", "eval/score", "grad_norm", "accuracy", "margin", "lr", "time/step"];
const PARTS = ["generate", "judge", "train", "sync", "wait", "eval", "save", "pause"];
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3", "12 4"];  // runs differ by more than colour
const SVG = "http://www.w3.org/2000/svg";
const TABS = { overview: "Overview", curves: "Curves", time: "Time", samples: "Samples", prompts: "Prompts",
  evaluations: "Evaluations", config: "Config", events: "Events" };

// -- state in the address ----------------------------------------------------------------------------------------------

function state() {
  const [tab, query] = location.hash.slice(1).split("?");
  return { tab: TABS[tab] ? tab : "overview", ...Object.fromEntries(new URLSearchParams(query || "")) };
}
function address(changes) {
  const { tab, ...rest } = { ...state(), ...changes };
  const kept = Object.fromEntries(Object.entries(rest).filter(([, value]) => value !== "" && value !== undefined && value !== null));
  const query = new URLSearchParams(kept).toString();
  return "#" + tab + (query ? "?" + query : "");
}
function go(changes, replace) {
  const to = address(changes);
  if (replace) { history.replaceState(null, "", to); render(); } else if (location.hash === to) render(); else location.hash = to;
}

// -- small helpers -----------------------------------------------------------------------------------------------------

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : size < 0.001 && size > 0 ? value.toExponential(1) : value.toPrecision(digits + (size < 1 ? 0 : 1)).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 60) return number(value) + " s";
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
function clock(time) { return time ? new Date(time * 1000).toLocaleString() : ""; }
function colour(run) { return `var(--run${run % 6})`; }
function swatch(run) { return el("span", { class: "swatch", style: `background:${colour(run)}` }); }
function runs() { return DATA.runs; }
function shownRun() { return Math.min(+(state().run || 0), runs().length - 1); }
function runSelect() {
  if (runs().length < 2) return null;
  return el("select", { "aria-label": "run", onchange: (event) => go({ run: event.target.value, step: "", prompt: "" }) },
    runs().map((run, i) => el("option", { value: i, selected: i === shownRun() }, run.name)));
}
function marked(text, needle) {
  if (!needle) return [text];
  const parts = [], low = text.toLowerCase(), find = needle.toLowerCase();
  let at = 0, hit;
  while ((hit = low.indexOf(find, at)) >= 0) { parts.push(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + find.length))); at = hit + find.length; }
  parts.push(text.slice(at));
  return parts;
}
function table(heads, rows) {
  const cells = [...(rows[0]?.children || [])];  // a head stands over its numbers
  return el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { class: cells[i]?.className === "number" ? "number" : "" }, head)))),
    el("tbody", {}, rows)));
}

// -- curves ------------------------------------------------------------------------------------------------------------

function series(run, tag) {
  const of = tag.startsWith("cold_start/") ? run.cold_start : run.curves;
  const values = of.values[tag.replace(/^cold_start\//, "")];
  return values ? { steps: of.steps, times: of.times, values } : null;
}
function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * weight + value * (1 - weight); total = total * weight + (1 - weight);
    return mean / total;
  });
}
// Keep the lowest and the highest point of each bin, so that a spike stays visible however long the run was.
function thin(points, most) {
  if (points.length <= most) return points;
  const bins = Math.floor(most / 2), thinned = [];
  for (let bin = 0; bin < bins; bin++) {
    const part = points.slice(Math.floor(bin * points.length / bins), Math.floor((bin + 1) * points.length / bins));
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a)), high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    thinned.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return thinned;
}
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((k) => k * power).find((step) => step >= raw);
  const found = [];
  for (let at = Math.ceil(low / size) * size; at <= high + size * 1e-9; at += size) found.push(Math.abs(at) < size * 1e-9 ? 0 : at);
  return found.length < 2 && count < 20 ? ticks(low, high, 2 * count) : found;
}
function plot(tag, width) {
  const settings = state(), weight = +(settings.smooth || 0), byTime = settings.x === "hours", log = settings.log === "1";
  const lines = runs().map((run, i) => {
    const found = series(run, tag);
    if (!found) return null;
    const start = found.times[0], y = smooth(found.values, weight);
    const points = found.steps.map((step, k) => [byTime ? (found.times[k] - start) / 3600 : step, y[k], step]);
    return { run: i, points: points.filter(([, value]) => value !== null && (!log || value > 0)) };
  }).filter((line) => line && line.points.length);
  const box = el("div", { class: "card plot", "data-tag": tag }, el("h3", {}, tag));
  box.append(el("div", { class: "explain dim" }, DATA.docs[tag] || ""));
  if (!lines.length) return el("div", { class: "card plot" }, el("h3", {}, tag), el("div", { class: "dim" }, log ? "no positive value" : "not measured"));
  const W = Math.max(240, width), H = 170, L = 46, R = 8, T = 8, B = 20, scale = log ? Math.log10 : (value) => value;
  const all = lines.flatMap((line) => line.points);
  let [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [y0, y1] = [Math.min(...all.map((p) => scale(p[1]))), Math.max(...all.map((p) => scale(p[1])))];
  const bands = lines.map((line) => tag === "eval/score" || /\/(avg|pass)@\d+$/.test(tag) ? band(runs()[line.run], tag, byTime, log) : null);
  for (const b of bands) if (b && !log) for (const [, low, high] of b) { y0 = Math.min(y0, low); y1 = Math.max(y1, high); }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y1 - y0 < 1e-12 * Math.max(1, Math.abs(y1))) { const pad = Math.abs(y1) * 0.05 || 0.5; y0 -= pad; y1 += pad; }
  const X = (x) => L + (x - x0) / (x1 - x0) * (W - L - R), Y = (y) => H - B - (scale(y) - y0) / (y1 - y0) * (H - T - B);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", preserveAspectRatio: "none", "aria-label": `${tag} of ${lines.length} run${lines.length > 1 ? "s" : ""}` });
  for (const at of ticks(y0, y1, 4)) {
    const y = H - B - (at - y0) / (y1 - y0) * (H - T - B);
    picture.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: y, y2: y }), svg("text", { x: L - 4, y: y + 3, "text-anchor": "end" }, log ? number(10 ** at, 2) : number(at)));
  }
  for (const at of ticks(x0, x1, 5)) picture.append(svg("text", { x: X(at), y: H - 6, "text-anchor": X(at) > W - 20 ? "end" : "middle" }, number(at)));
  for (const line of lines) if (!byTime) for (const event of runs()[line.run].events) {
    if ((event.kind !== "fault" && event.kind !== "resumed") || event.step < x0 || event.step > x1) continue;
    const mark = svg("line", { class: event.kind === "fault" ? "event fault" : "event", x1: X(event.step), x2: X(event.step), y1: event.kind === "fault" ? H - B - 14 : T, y2: H - B });
    mark.append(svg("title", {}, event.text));
    picture.append(mark);
  }
  lines.forEach((line, k) => {
    if (bands[k] && !log && bands[k].length > 1) {
      const up = bands[k].map(([x, , high]) => `${X(x).toFixed(1)},${Y(high).toFixed(1)}`);
      const down = bands[k].map(([x, low]) => `${X(x).toFixed(1)},${Y(low).toFixed(1)}`).reverse();
      picture.append(svg("polygon", { points: [...up, ...down].join(" "), style: `fill:${colour(line.run)};opacity:.15` }));
    }
    const path = thin(line.points, 800).map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
    picture.append(svg("path", { d: path, style: `fill:none;stroke:${colour(line.run)};stroke-width:1.6`, "stroke-dasharray": DASHES[line.run % 6], "vector-effect": "non-scaling-stroke" }));
    if (line.points.length < 30) for (const [x, y] of line.points) picture.append(svg("circle", { cx: X(x), cy: Y(y), r: 2.2, style: `fill:${colour(line.run)}` }));
  });
  const cursor = svg("line", { class: "axis", y1: T, y2: H - B, x1: -9, x2: -9, style: "stroke:var(--text)" });
  picture.append(cursor);
  const readOut = el("div", { class: "read-out" });
  const last = () => readOut.replaceChildren(...lines.map((line) => el("span", {}, swatch(line.run), `${number(line.points.at(-1)[1], 4)} at step ${line.points.at(-1)[2]}  `)));
  last();
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect(), x = x0 + ((event.clientX - box.left) / box.width * W - L) / (W - L - R) * (x1 - x0);
    let near = null;
    readOut.replaceChildren(...lines.map((line) => {
      near = line.points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
      return el("span", {}, swatch(line.run), `${number(near[1], 4)} at step ${near[2]}  `);
    }));
    cursor.setAttribute("x1", X(near[0])); cursor.setAttribute("x2", X(near[0]));
  });
  picture.addEventListener("pointerleave", () => { cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); last(); });
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect(), x = x0 + ((event.clientX - box.left) / box.width * W - L) / (W - L - R) * (x1 - x0);
    if (byTime || tag.startsWith("cold_start/")) return;
    const steps = stepsOf(runs()[shownRun()]);
    if (steps.length) go({ tab: "samples", step: steps.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a)), prompt: "" });
  });
  box.append(picture, readOut);
  return box;
}
function band(run, tag, byTime, log) {
  const low = series(run, tag === "eval/score" ? "eval/low" : tag + "/low"), high = series(run, tag === "eval/score" ? "eval/high" : tag + "/high");
  if (!low || !high || log) return null;
  return low.steps.map((step, k) => [byTime ? (low.times[k] - low.times[0]) / 3600 : step, low.values[k], high.values[k]]).filter(([, a, b]) => a !== null && b !== null);
}
// A plot is drawn when it is about to be seen.
function lazily(parent, makers) {
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); entry.target.replaceWith(entry.target.make(entry.target.clientWidth - 24)); }
  }, { rootMargin: "300px" });
  for (const make of makers) { const place = el("div", { class: "card plot", style: "height:230px" }); place.make = make; parent.append(place); watcher.observe(place); }
}
function legend() {
  if (runs().length < 2) return null;
  return el("div", { class: "legend" }, runs().map((run, i) => {
    const line = svg("svg", { width: 34, height: 10 });
    line.append(svg("line", { x1: 0, x2: 34, y1: 5, y2: 5, style: `stroke:${colour(i)};stroke-width:2.5`, "stroke-dasharray": DASHES[i % 6] }));
    return el("span", {}, line, " ", run.name);
  }));
}

// -- views -------------------------------------------------------------------------------------------------------------

const VIEWS = {};

VIEWS.overview = () => {
  const cards = runs().map((run, i) => {
    const score = series(run, "eval/score"), reward = series(run, "reward/mean") || series(run, "loss"), step = series(run, "time/step");
    const ends = (found) => { const v = found ? found.values.filter((x) => x !== null) : []; return v.length ? (v.length > 1 ? `${number(v[0])} → ${number(v.at(-1))}` : number(v[0])) : "–"; };
    const sorted = step ? step.values.filter((x) => x !== null).sort((a, b) => a - b) : [];
    const faults = run.events.filter((event) => event.kind === "fault"), summary = run.summary;
    const facts = [["state", `${run.state.name}: ${number(run.state.done)} of ${run.state.total ?? "?"} steps`], ["held-out", ends(score)],
      [series(run, "reward/mean") ? "reward" : "loss", ends(reward)], ["seconds per step", sorted.length ? `${number(sorted[sorted.length >> 1])} (median)` : "–"],
      ["wall time", seconds(summary.wall_seconds)], ["faults", faults.length ? `${faults.length}, ${seconds(faults.reduce((s, f) => s + (f.seconds || 0), 0))} until recovered` : "none"],
      ["model", run.config["model.hf_assets_path"] || run.config["model.name"] || "–"], ["algorithm", run.config["algorithm.name"] || "–"],
      ["learning rate", number(run.config["optimizer.lr"])], ["last line", clock(run.state.last)],
      ["commit", (summary.git_commit || "–").slice(0, 12)], ["machine", summary.machine ? String(summary.machine.name || summary.machine.cpu || Object.values(summary.machine)[0]) : "–"], ["folder", run.folder]];
    return el("section", { class: "card" }, el("h3", {}, swatch(i), run.name), el("dl", {}, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])));
  });
  const findings = runs().flatMap((run, i) => (run.findings || []).map((finding) => el("section", { class: "card finding" + (finding.severity === "notice" ? " notice" : "") },
    el("div", { class: "bold" }, runs().length > 1 ? swatch(i) : null, finding.text), finding.changes.map((change, k) => el("div", {}, k ? "or " : "change ", el("code", {}, change))),
    finding.advice ? el("div", { class: "dim" }, finding.advice) : null, finding.effects.map((effect) => el("div", { class: "dim" }, "effect: " + effect)),
    (finding.samples || []).map(([step, prompt]) => el("a", { href: address({ tab: "samples", run: i, step, prompt }) }, `step ${step}, prompt ${prompt}`)).flatMap((link) => [link, " "]))));
  const plots = el("div", { class: "cards" });
  const tags = runs().some((run) => run.curves.values["reward/mean"]) ? OVERVIEW : OVERVIEW_FIT;
  lazily(plots, tags.filter((tag) => runs().some((run) => series(run, tag))).map((tag) => (width) => plot(tag, width)));
  const left = runs().flatMap((run) => run.left_out.map((text) => el("li", {}, runs().length > 1 ? `${run.name}: ${text}` : text)));
  return [el("div", { class: "cards" }, cards), findings.length ? [el("h2", {}, "What to look at"), el("div", { class: "findings" }, findings)] : null,
    el("h2", {}, "Curves"), legend(), plots,
    el("p", { class: "dim" }, "Marks on the axis: faults; dashed lines: the run was resumed. A click on a curve opens the samples of that step."),
    left.length ? [el("h2", {}, "What this page leaves out"), el("ul", {}, left)] : null,
    el("p", { class: "dim" }, `Written ${clock(DATA.made)} by titan_rl ${DATA.version}.`)];
};

VIEWS.curves = () => {
  const settings = state(), filter = (settings.tags || "").toLowerCase();
  const tags = new Set(runs().flatMap((run) => [...Object.keys(run.curves.values), ...Object.keys(run.cold_start.values).map((tag) => "cold_start/" + tag)]));
  const shown = [...tags].filter((tag) => tag.toLowerCase().includes(filter) && !/^eval\/(.*\/)?(low|high)$/.test(tag));
  const first = [...OVERVIEW, ...OVERVIEW_FIT];
  const rank = (tag) => (first.includes(tag) ? first.indexOf(tag) : tag.startsWith("cold_start/") ? 2000 : 1000);
  shown.sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  const plots = el("div", { class: "cards" });
  lazily(plots, shown.map((tag) => (width) => plot(tag, width)));
  return [el("div", { class: "controls" },
    el("input", { type: "search", id: "search", placeholder: "metric (/)", value: settings.tags || "", "aria-label": "filter metrics", oninput: (event) => go({ tags: event.target.value }, true) }),
    el("label", {}, "smooth ", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth || 0, "aria-label": "smoothing", onchange: (event) => go({ smooth: event.target.value }, true) })),
    el("label", {}, el("input", { type: "checkbox", checked: settings.log === "1", onchange: (event) => go({ log: event.target.checked ? "1" : "" }, true) }), " log"),
    el("label", {}, el("input", { type: "checkbox", checked: settings.x === "hours", onchange: (event) => go({ x: event.target.checked ? "hours" : "" }, true) }), " hours"),
    el("span", { class: "dim" }, `${shown.length} of ${tags.size} metrics`)), legend(), plots];
};

VIEWS.time = () => runs().map((run, i) => {
  const per = PARTS.map((part) => series(run, "time/" + part)), steps = run.curves.steps, totals = PARTS.map((part, k) => (per[k] ? per[k].values.reduce((s, v) => s + (v || 0), 0) : 0));
  const whole = run.summary.seconds || Object.fromEntries(PARTS.map((part, k) => [part, totals[k]]));
  const sum = Object.values(whole).reduce((a, b) => a + b, 0) || 1;
  const rows = Object.entries(whole).filter(([, spent]) => spent > sum / 1000).map(([part, spent]) => el("tr", {}, el("td", {}, part.replace("_", " ")), el("td", { class: "number" }, seconds(spent)), el("td", { class: "number" }, (100 * spent / sum).toFixed(1) + "%"),
    el("td", { style: "width:50%" }, el("div", { class: "bars" }, el("div", { style: `width:${100 * spent / sum}%;background:${colour(Math.max(0, PARTS.indexOf(part)))}` })))));
  const bins = Math.min(steps.length, 200), W = 1000, H = 160, picture = svg("svg", { viewBox: `0 0 ${W} ${H + 16}`, preserveAspectRatio: "none", role: "img", "aria-label": "seconds of each step by part" });
  const heights = [...Array(bins)].map((_, bin) => {
    const from = Math.floor(bin * steps.length / bins), to = Math.max(from + 1, Math.floor((bin + 1) * steps.length / bins));
    return { step: steps[from], parts: per.map((found) => (found ? found.values.slice(from, to).reduce((s, v) => s + (v || 0), 0) / (to - from) : 0)) };
  });
  const top = Math.max(1e-9, ...heights.map((bin) => bin.parts.reduce((a, b) => a + b, 0)));
  heights.forEach((bin, k) => {
    let base = H;
    bin.parts.forEach((spent, part) => {
      const h = spent / top * (H - 12);
      if (h < 0.2) return;
      const bar = svg("rect", { x: k * W / bins, width: Math.max(0.8, W / bins - 0.6), y: base - h, height: h, style: `fill:${colour(part)};opacity:${part > 5 ? 0.55 : 1}` });
      bar.append(svg("title", {}, `step ${bin.step}: ${PARTS[part]} ${seconds(spent)}`));
      picture.append(bar); base -= h;
    });
  });
  picture.append(svg("text", { x: 0, y: 10 }, `${number(top)} s`), svg("text", { x: 0, y: H + 13 }, `step ${steps[0] ?? ""}`), svg("text", { x: W, y: H + 13, "text-anchor": "end" }, `step ${steps.at(-1) ?? ""}`));
  const names = el("div", { class: "legend" }, PARTS.map((part, k) => (totals[k] > 0 ? el("span", {}, el("span", { class: "swatch", style: `background:${colour(k)};opacity:${k > 5 ? 0.55 : 1}` }), part) : null)));
  return el("section", {}, el("h2", {}, swatch(i), run.name), names, el("div", { class: "card plot" }, picture), table(["part", "seconds", "share", ""], rows));
});

// -- samples -----------------------------------------------------------------------------------------------------------

const SORTS = {
  order: ["in order", (a, b) => a.index - b.index], best: ["best reward", (a, b) => best(b) - best(a)], worst: ["worst reward", (a, b) => worst(a) - worst(b)],
  spread: ["most spread", (a, b) => best(b) - worst(b) - best(a) + worst(a)], longest: ["longest", (a, b) => most(b, "tokens") - most(a, "tokens")], stale: ["most off-policy", (a, b) => most(b, "age") - most(a, "age")],
};
const KEEPS = { "": "all", cut: "cut off", failed: "no reward", mixed: "with signal", zero: "all lowest", tools: "with turns" };
const best = (group) => Math.max(...group.samples.map((s) => s.reward ?? -Infinity)), worst = (group) => Math.min(...group.samples.map((s) => s.reward ?? Infinity));
const most = (group, key) => Math.max(...group.samples.map((s) => s[key] || 0));
function kept(group, filter) {
  const rewards = group.samples.map((s) => s.reward).filter((r) => r !== null);
  if (filter === "cut") return group.samples.some((s) => s.cut_off);
  if (filter === "failed") return rewards.length < group.samples.length;
  if (filter === "mixed") return new Set(rewards).size > 1;
  if (filter === "zero") return rewards.length && rewards.every((r) => r <= 0);
  if (filter === "tools") return group.samples.some((s) => s.turns > 1 || (s.messages || []).some((m) => m.calls));
  return true;
}
function stepsOf(run, set = "") { return [...new Set(run.groups.filter((group) => group.set === set).map((group) => group.step))]; }
function setsOf(run) { return [...new Set(run.groups.map((group) => group.set))]; }
function shownSet(run) { const sets = setsOf(run), set = state().set || ""; return sets.includes(set) ? set : sets[0] || ""; }
function contains(group, needle) {
  if (!needle) return true;
  const text = [group.prompt, group.answer, ...group.samples.flatMap((s) => [s.text, s.error, ...(s.messages || []).map((m) => (m.content || "") + (m.calls || []).join(" "))])].join("\n").toLowerCase();
  return text.includes(needle.toLowerCase());
}
function chosenGroups() {
  const settings = state(), run = runs()[shownRun()], set = shownSet(run), steps = stepsOf(run, set);
  const step = settings.step === "all" ? null : steps.includes(+settings.step) ? +settings.step : steps.at(-1);
  const groups = run.groups.filter((group) => group.set === set && (step === null || group.step === step) && kept(group, settings.only || "") && contains(group, settings.q));
  groups.sort((SORTS[settings.sort] || SORTS.order)[1]);
  if (step === null && !SORTS[settings.sort]) groups.sort((a, b) => a.step - b.step || a.index - b.index);
  const group = groups.find((each) => each.id === +settings.prompt && (step !== null || !settings.at || each.step === +settings.at)) || groups[0];
  return { run, steps, step, groups, group };
}
VIEWS.samples = () => {
  const settings = state(), { run, steps, step, groups, group } = chosenGroups();
  if (!run.groups.length) return [el("div", { class: "controls" }, runSelect()), el("p", {}, "This run has no rollouts: its algorithm learns from given data.")];
  const option = (value, text, selected) => el("option", { value, selected }, text);
  const controls = el("div", { class: "controls" }, runSelect(),
    setsOf(run).length > 1 ? el("select", { "aria-label": "kind of samples", onchange: (event) => go({ set: event.target.value, step: "", prompt: "" }) }, setsOf(run).map((set) => option(set, set || "training", set === shownSet(run)))) : null,
    el("label", {}, "step ", el("select", { id: "step", onchange: (event) => go({ step: event.target.value, prompt: settings.prompt }) }, steps.map((s) => option(s, s, s === step)), option("all", "all", step === null))),
    el("select", { "aria-label": "order", onchange: (event) => go({ sort: event.target.value, prompt: "" }) }, Object.entries(SORTS).map(([key, [text]]) => option(key, text, key === (settings.sort || "order")))),
    el("select", { "aria-label": "filter", onchange: (event) => go({ only: event.target.value, prompt: "" }) }, Object.entries(KEEPS).map(([key, text]) => option(key, text, key === (settings.only || "")))),
    el("input", { type: "search", id: "search", placeholder: "text (/)", value: settings.q || "", "aria-label": "search in samples", onchange: (event) => go({ q: event.target.value, prompt: "" }) }),
    el("span", { class: "chips", role: "group", "aria-label": "colour of tokens" }, Object.entries(COLOURS).filter(([key]) => key !== "gap" || hasGaps(run)).map(([key, text]) => el("button", { "aria-pressed": String((settings.colour || "mask") === key), onclick: () => go({ colour: key }) }, text))));
  const [head, tail] = shared(groups.map((each) => each.prompt));
  const list = el("div", { class: "list", id: "groups" }, groups.map((each) => el("button", { "aria-current": String(each === group), onclick: () => go({ prompt: each.id, at: each.step }) },
    el("span", { class: "excerpt" }, excerpt(differs(each.prompt, head, tail))), el("span", { class: "dim" }, `${step === null ? `step ${each.step}, ` : ""}${each.set ? "problem" : "prompt"} ${each.id}: ${number(worst(each) === Infinity ? null : worst(each))} to ${number(best(each) === -Infinity ? null : best(each))}`,
      each.samples.some((s) => s.cut_off) ? `, ${each.samples.filter((s) => s.cut_off).length} cut off` : ""))), groups.length ? null : el("p", { class: "dim", style: "padding:.6rem" }, "No group fits."));
  return [controls, el("div", { class: "samples" }, list, group ? groupView(run, group, settings) : el("div", {}))];
};
// How many characters begin and end all prompts, up to a whole word: a system prompt and the template, which tell nothing apart.
function shared(prompts) {
  const [first, ...others] = prompts;
  if (!others.length) return [0, 0];
  let head = first.length, tail = Math.min(...prompts.map((text) => text.length));
  for (const text of others) { let k = 0; while (k < head && text[k] === first[k]) k++; head = k; }
  tail = Math.max(0, tail - head);
  for (const text of others) { let k = 0; while (k < tail && text[text.length - 1 - k] === first[first.length - 1 - k]) k++; tail = k; }
  const end = tail ? first.slice(-tail).search(/\s|</) : -1;
  return [first.slice(0, head).search(/[^\s>]*$/), end < 0 ? 0 : tail - end];
}
function differs(prompt, head, tail) { const text = prompt.slice(head, prompt.length - tail); return text.trim() ? text : prompt; }
// The end of a rendered chat says more than its template's beginning.
function excerpt(prompt) { const text = prompt.replace(/<\|[^|>]*\|>/g, " ").replace(/\s+/g, " ").trim(); return text.length > 160 ? "…" + text.slice(-160) : text || "(empty)"; }
const COLOURS = { mask: "sampled", logprob: "log-prob", gap: "gap", version: "version", advantage: "advantage", plain: "plain" };
function hasGaps(run) { return run.groups.some((group) => group.samples.some((s) => (s.segments || []).some((segment) => segment.gaps))); }
function groupView(run, group, settings) {
  const again = run.groups.filter((each) => each.set === group.set && each.prompt === group.prompt && each.step !== group.step).map((each) => el("a", { href: address({ step: each.step, prompt: each.id, at: each.step }) }, `step ${each.step} (${number(worst(each))} to ${number(best(each))}) `));
  return el("section", {}, el("h3", {}, `${group.set ? group.set + " at " : ""}step ${group.step}, ${group.set ? "problem" : "prompt"} ${group.id}`),
    again.length ? el("p", {}, el("span", { class: "dim" }, "the same prompt: "), again) : null,
    el("details", { open: group.prompt.length < 1500 }, el("summary", {}, `prompt (${group.prompt.length.toLocaleString("en")} characters)`), el("div", { class: "text read" }, marked(group.prompt, settings.q))),
    group.images.map((name) => image(run, name)),
    el("p", {}, el("span", { class: "dim" }, "expected answer: "), el("code", {}, group.answer || "–")), key(settings.colour || "mask"),
    el("div", { class: "side" }, group.samples.map((sample) => sampleView(run, sample, group, settings))));
}
function image(run, name) { return run.images[name] ? el("img", { src: run.images[name], alt: name, title: name, class: "seen" }) : el("p", { class: "dim" }, `image ${name}`); }
function key(colour) {
  const texts = { mask: "Tokens that the policy sampled are blue; grey ones were read.", logprob: "The darker the orange, the less likely the token was when it was sampled.", gap: "The darker the orange, the more the trainer's log-prob differs from the generator's: from 1e-6 to 1, logarithmic. Steps that were replayed have it.",
    version: "Each policy version has its colour; hover for the number.", advantage: "Blue tokens are made more likely, orange ones less likely.", plain: "" };
  return el("p", { class: "dim" }, texts[colour]);
}
function sampleView(run, sample, group, settings) {
  const parts = Object.entries(sample.rewards || {}), mark = sample.reward === null || best(group) === worst(group) ? "" : sample.reward >= best(group) ? "good" : sample.reward <= worst(group) ? "bad" : "";
  const facts = [["advantage", number(sample.advantage)], ["tokens", number(sample.tokens)], sample.penalty ? ["penalty", number(sample.penalty)] : null,
    ["ended", sample.cut_off ? "cut off" : sample.status === "completed" ? sample.finish : sample.status], sample.turns > 1 ? ["turns", sample.turns] : null, sample.age ? ["age", sample.age] : null, ...parts.map(([name, value]) => [name, number(value)])].filter(Boolean);
  return el("article", { class: "card", id: `sample-${sample.index}` }, el("div", {}, el("span", { class: "bold " + mark }, sample.reward === null ? "no reward" : "reward " + number(sample.reward)), el("span", { class: "dim" }, ` sample ${sample.index}`)),
    el("dl", {}, facts.map(([name, value]) => [el("dt", {}, name), el("dd", { class: name === "ended" && value === "cut off" ? "bad" : "" }, String(value))])),
    sample.error ? el("p", { class: "bad" }, sample.error) : null,
    sample.messages ? el("div", {}, sample.messages.map((message, i) => turnView(run, message, i, sample.messages.length, settings))) : null,
    sample.segments ? (sample.messages ? el("details", {}, el("summary", {}, "token by token"), tokens(sample, settings)) : tokens(sample, settings)) : sample.messages ? null : el("div", { class: "text" }, marked(sample.text, settings.q)));
}
function turnView(run, message, index, count, settings) {
  const body = [(message.images || []).map((name) => image(run, name)), message.content ? el("div", { class: "text" }, marked(message.content, settings.q)) : null, (message.calls || []).map((call) => el("div", { class: "text" }, "→ ", marked(call, settings.q)))];
  const size = (message.content || "").length, open = message.role !== "system" && (size < 1200 || index === count - 1);
  return el("details", { class: "turn " + message.role.replace(/[^a-z]/g, ""), open }, el("summary", {}, `${message.role}${message.name ? ` ${message.name}` : ""}${message.calls ? " calls a tool" : ""} (${size.toLocaleString("en")})`), body);
}
function tokens(sample, settings) {
  const how = settings.colour || "mask", box = el("div", { class: "text" });
  let first = true;
  for (const segment of sample.segments) {
    if (segment.read !== undefined) {
      if (!first || sample.segments.length === 1) box.append(el("span", { class: "read" }, marked(segment.read, settings.q)));
      first = false;
      continue;
    }
    first = false;
    const versions = segment.versions.flatMap(([version, count]) => Array(count).fill(version));
    if (how === "plain") { box.append(...marked(segment.pieces.join(""), settings.q)); continue; }
    segment.pieces.forEach((piece, i) => {
      const logprob = segment.logprobs[i], gap = segment.gaps ? segment.gaps[i] : null;
      const title = `log-prob ${number(logprob)}, version ${versions[i]}` + (gap === null ? "" : `, gap ${number(gap)}`);
      box.append(el("span", { title, style: shade(how, { logprob, gap, version: versions[i], advantage: sample.advantage }) }, piece === "" ? "" : piece));
    });
  }
  return box;
}
function shade(how, token) {
  if (how === "logprob") return token.logprob === null ? "" : `background:rgba(var(--warm),${Math.min(0.85, -token.logprob / 5).toFixed(2)})`;
  if (how === "gap") return token.gap === null ? "" : `background:rgba(var(--warm),${Math.max(0, Math.min(0.85, (Math.log10(Math.abs(token.gap) + 1e-9) + 6) / 6)).toFixed(2)})`;
  if (how === "version") return `border-bottom:3px solid var(--run${token.version % 6})`;
  if (how === "advantage") return `background:rgba(var(--${token.advantage >= 0 ? "cool" : "warm"}),${Math.min(0.7, Math.abs(token.advantage) / 2).toFixed(2)})`;
  return "background:rgba(var(--cool),.16)";
}

// -- prompts, evaluations, config, events ------------------------------------------------------------------------------

VIEWS.prompts = () => {
  const settings = state(), i = shownRun(), run = runs()[i], only = settings.fate || "";
  const fates = { "": "all", trained: "trained", dropped: "dropped", again: "admitted again", open: "unfinished" };
  const fits = (p) => only === "trained" ? p.trained !== null : only === "dropped" ? p.dropped : only === "again" ? p.admissions > 1 : only === "open" ? p.trained === null && !p.dropped : true;
  const shown = run.prompts.filter((p) => fits(p) && (!settings.q || String(p.id) === settings.q || p.dropped.includes(settings.q)));
  const samples = new Map(run.groups.filter((group) => !group.set).map((group) => [group.id, group.step]));
  const rows = shown.slice(0, 500).map((p) => el("tr", { class: samples.has(p.id) ? "link" : "", onclick: samples.has(p.id) ? () => go({ tab: "samples", step: samples.get(p.id), prompt: p.id, q: "" }) : () => {} },
    el("td", { class: "number" }, String(p.id)), el("td", {}, `after step ${p.admitted}, for step ${p.turn}${p.admissions > 1 ? `; ${p.admissions} times` : ""}`),
    el("td", {}, p.tokens.length ? `${p.tokens.length} samples, ${p.tokens.reduce((a, b) => a + b, 0)} tokens` : "–"), el("td", {}, p.versions.length ? (p.versions[0] === p.versions[1] ? `version ${p.versions[0]}` : `versions ${p.versions.join(" to ")}`) : "–"),
    el("td", {}, p.rewards.length ? p.rewards.map((r) => number(r)).join(" ") : "–"), el("td", { class: p.dropped ? "bad" : "" }, p.trained !== null ? `trained at step ${p.trained}` : p.dropped ? `dropped: ${p.dropped}` : "unfinished")));
  return [el("div", { class: "controls" }, runSelect(), el("select", { "aria-label": "fate", onchange: (event) => go({ fate: event.target.value }) }, Object.entries(fates).map(([key, text]) => el("option", { value: key, selected: key === only }, text))),
    el("input", { type: "search", id: "search", placeholder: "prompt id or reason (/)", value: settings.q || "", onchange: (event) => go({ q: event.target.value }) }),
    el("span", { class: "dim" }, `${shown.length.toLocaleString("en")} of ${run.prompts.length.toLocaleString("en")} prompts${shown.length > 500 ? ", the first 500 shown" : ""}; a row opens its samples`)),
    run.prompts.length ? table(["prompt", "admitted", "sampled", "by", "rewards", "outcome"], rows) : el("p", {}, "This run has no ledger: its algorithm learns from given data.")];
};

VIEWS.evaluations = () => runs().flatMap((run, i) => run.evaluations.map((set) => {
  const low = Math.min(0, ...set.rewards.flat().filter((r) => r !== null)), high = Math.max(1, ...set.rewards.flat().filter((r) => r !== null));
  const average = (row) => { const v = row.filter((r) => r !== null); return v.reduce((a, b) => a + b, 0) / (v.length || 1); };
  const order = set.rewards.map((row, k) => [average(row), k]).sort((a, b) => a[0] - b[0]);  // the hardest first
  const always = set.rewards.filter((row) => row.every((r) => r !== null && r >= high)).length, never = set.rewards.filter((row) => row.every((r) => r === null || r <= low)).length;
  const rows = order.map(([, k]) => el("tr", {}, el("th", {}, set.problems[k]), set.rewards[k].map((reward, s) => el("td", { title: `problem ${set.problems[k]}, step ${set.steps[s]}: ${number(reward)}`, style: reward === null ? "" : `background:rgba(var(--cool),${((reward - low) / (high - low)).toFixed(2)})` }))));
  return el("section", {}, el("h2", {}, swatch(i), `${run.name}: ${set.set}`), el("p", { class: "dim" }, `A row is a problem, a column an evaluation (steps ${set.steps[0]} to ${set.steps.at(-1)}); darker is a higher mean reward. Solved at every evaluation: ${always} of ${set.problems.length}; never: ${never}.`),
    el("div", { class: "wide" }, el("table", { class: "heat" }, el("thead", {}, el("tr", {}, el("th", {}, "problem"), set.steps.map((s) => el("th", {}, s)))), el("tbody", {}, rows))));
})).concat(runs().every((run) => !run.evaluations.length) ? [el("p", {}, "Not evaluated.")] : []);

VIEWS.config = () => {
  const settings = state(), needle = (settings.q || "").toLowerCase(), which = settings.keys || (runs().length > 1 ? "differ" : "set");
  const keys = [...new Set(runs().flatMap((run) => Object.keys(run.config)))].sort();
  const text = (value) => (value === undefined ? "–" : JSON.stringify(value));
  const differs = (key) => new Set(runs().map((run) => text(run.config[key]))).size > 1;
  const isSet = (key) => runs().some((run) => text(run.config[key]) !== text(run.defaults[key]));
  const shown = keys.filter((key) => (which === "differ" ? differs(key) : which === "set" ? isSet(key) : true) && (key + runs().map((run) => text(run.config[key]))).toLowerCase().includes(needle));
  const option = (value, name) => el("option", { value, selected: which === value }, name);
  return [el("div", { class: "controls" }, el("select", { "aria-label": "which keys", onchange: (event) => go({ keys: event.target.value }) }, runs().length > 1 ? option("differ", "keys that differ") : null, option("set", "keys that are not the default"), option("all", "all keys")),
    el("input", { type: "search", id: "search", placeholder: "key or value (/)", value: settings.q || "", oninput: (event) => go({ q: event.target.value }, true) }), el("span", { class: "dim" }, `${shown.length} of ${keys.length} keys`)),
    shown.length ? table(["key", ...runs().map((run) => run.name), "default"], shown.map((key) => el("tr", {}, el("td", {}, el("code", {}, key)), runs().map((run) => el("td", { class: differs(key) ? "bold" : "" }, el("code", {}, text(run.config[key])))), el("td", { class: "dim" }, el("code", {}, text(runs()[0].defaults[key])))))) : el("p", {}, which === "differ" ? "The configs are equal." : "No key fits.")];
};

VIEWS.events = () => runs().map((run, i) => {
  const rows = run.events.map((event) => el("tr", {}, el("td", { class: "number" }, String(event.step)), el("td", {}, clock(event.time)), el("td", { class: event.kind === "fault" ? "bad" : "" }, event.kind), el("td", {}, event.text),
    el("td", { class: "number" }, event.seconds ? seconds(event.seconds) : ""), el("td", {}, [event.redone ? `${event.redone} steps made again` : "", event.anew ? `${event.anew} samples made again` : ""].filter(Boolean).join(", "))));
  return el("section", {}, el("h2", {}, swatch(i), run.name), rows.length ? table(["after step", "time", "event", "", "seconds", "price"], rows) : el("p", {}, "No events."));
});

// -- the page ----------------------------------------------------------------------------------------------------------

function render() {
  const { tab } = state(), focused = document.activeElement && document.activeElement.id === "search" ? document.activeElement.selectionStart : null;
  document.getElementById("title").textContent = runs().map((run) => run.name).join(" · ");
  document.getElementById("tabs").replaceChildren(...Object.entries(TABS).map(([key, name]) => el("button", { role: "tab", "aria-selected": String(key === tab), onclick: () => go({ tab: key, q: "" }) }, name)));
  view.replaceChildren(...[VIEWS[tab]()].flat(9).filter(Boolean));
  const search = document.getElementById("search");
  if (search && focused !== null) { search.focus(); search.setSelectionRange(focused, focused); }
  const current = view.querySelector('[aria-current="true"]');
  if (current) current.scrollIntoView({ block: "nearest" });
}
const KEYS = { "1 to 8": "views", "j / k": "next and previous group", "← / →": "previous and next step with samples", "c": "next colour of tokens", "/": "search", "d": "dark or light", "?": "these keys" };
function showKeys() {
  const dialog = document.getElementById("keys");
  dialog.replaceChildren(el("h2", {}, "Keys"), el("dl", {}, Object.entries(KEYS).map(([name, text]) => [el("dt", { class: "bold" }, name), el("dd", {}, text)])), el("form", { method: "dialog" }, el("button", {}, "close")));
  if (!dialog.open) dialog.showModal();
}
function theme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
  const tabs = Object.keys(TABS), settings = state();
  if (event.key >= "1" && event.key <= String(tabs.length)) go({ tab: tabs[event.key - 1], q: "" });
  else if (event.key === "/") { const search = document.getElementById("search"); if (search) { event.preventDefault(); search.focus(); search.select(); } }
  else if (event.key === "d") theme();
  else if (event.key === "?") showKeys();
  else if (settings.tab === "samples") {
    const { steps, step, groups, group } = chosenGroups(), at = groups.indexOf(group);
    if (event.key === "c") { const names = Object.keys(COLOURS); go({ colour: names[(names.indexOf(settings.colour || "mask") + 1) % names.length] }); }
    else if ((event.key === "j" || event.key === "k") && groups.length) { const next = groups[Math.max(0, Math.min(groups.length - 1, at + (event.key === "j" ? 1 : -1)))]; go({ prompt: next.id, at: next.step }); }
    else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && step !== null) { event.preventDefault(); go({ step: steps[Math.max(0, Math.min(steps.length - 1, steps.indexOf(step) + (event.key === "ArrowRight" ? 1 : -1)))] }); }
  }
});
document.getElementById("theme").addEventListener("click", theme);
document.getElementById("help").addEventListener("click", showKeys);
addEventListener("hashchange", render);
let asking = false;  // to collect a long run takes longer than the interval
if (DATA.live) setInterval(async () => {
  if (asking) return;
  asking = true;
  try {
    const answer = await fetch("data.json" + location.search, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const found = await answer.json();
    if (JSON.stringify(found.runs) !== JSON.stringify(DATA.runs)) { DATA = found; const y = scrollY; render(); scrollTo(0, y); }
    document.title = DATA.title;
  } catch (error) { document.title = "not live: " + error.message; } finally { asking = false; }
}, DATA.live.seconds * 1000);
render();
