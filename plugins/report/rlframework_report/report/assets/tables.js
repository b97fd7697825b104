// The summary at the top of the page, the configurations, and the environments of the runs.
const CARDS = 4;

function summary() {
  if (data.runs.length > CARDS) return el("section", { id: "summary" }, el("h1", {}, data.title), overview());
  const cards = data.runs.map((run, index) => {
    const line = run.headline;
    const big = line.word ? el("div", { class: "big" }, el("b", {}, line.last), el("span", {}, `${line.word} at step ${line.last_step.toLocaleString("en")}`, line.best_step !== line.last_step ? `; best ${line.best} at ${line.best_step.toLocaleString("en")}` : ", the best")) : null;
    const facts = run.facts.flatMap(([word, value]) => [el("dt", {}, word), el("dd", {}, value)]);
    const title = el("h3", {}, runKey(index), run.name, el("span", { class: "state" }, line.state));
    return el("article", { class: `card run ${colour(index)}` }, title, big, el("dl", {}, facts, el("dt", {}, "folder"), el("dd", { class: "mono" }, run.path)), run.notes.map((note) => el("p", { class: "note warn" }, note)));
  });
  return el("section", { id: "summary" }, el("h1", {}, data.title), el("div", { class: data.runs.length === 1 ? "runs single" : "runs" }, cards));
}

/** A table with one row per run, for many runs. */
function overview() {
  const words = [...new Set(data.runs.flatMap((run) => run.facts.map(([word]) => word)))];
  const rows = data.runs.map((run, index) => {
    const facts = new Map(run.facts);
    const notes = run.notes.map((note) => el("div", { class: "warn" }, note));
    return el("tr", {}, el("td", {}, runName(index)), el("td", {}, run.headline.state, notes), words.map((word) => el("td", { class: word.startsWith("held-out") ? "wide-cell" : null }, facts.get(word) ?? "–")));
  });
  const head = el("tr", {}, ["run", "state", ...words].map((word) => el("th", {}, word)));
  return el("div", { class: "card long-card" }, el("div", { class: "scroll" }, el("table", { class: "overview" }, el("thead", {}, head), el("tbody", {}, rows))));
}

function configuration() {
  return settings("configuration", "Configuration", "config", "This run has no config.yaml.");
}

function environment() {
  return settings("environment", "Environment", "environment", null);
}

/** The flattened keys of each run: blocks for a single run, a table of differences for several. */
function settings(id, title, key, missing) {
  const given = data.runs.map((run) => run[key]);
  if (given.every((values) => !values)) return missing ? el("section", { id }, el("h2", {}, title), el("p", { class: "note" }, missing)) : null;
  return el("section", { id }, el("h2", {}, title), data.runs.length === 1 ? blocks(given[0]) : compared(given));
}

function blocks(values) {
  const parts = new Map();
  for (const [key, value] of Object.entries(values)) {
    const [head, ...rest] = key.split(".");
    const block = rest.length ? head : "";
    parts.set(block, [...(parts.get(block) ?? []), [rest.join(".") || head, value]]);
  }
  const shown = [...parts].map(([head, rows]) => el("div", { class: rows.length > 14 ? "block long-block" : "block" }, el("h4", {}, head || "run"), el("dl", {}, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { class: "mono" }, value)]))));
  return el("div", { class: "card keys" }, shown);
}

function compared(given) {
  const keys = [...new Set(given.flatMap((values) => Object.keys(values ?? {})))];
  const differs = (key) => new Set(given.map((values, i) => (state.shown[i] && values ? values[key] ?? "" : null)).filter((value) => value !== null)).size > 1;
  const view = { all: false, search: "" };
  const [head, body, status] = [el("tr"), el("tbody"), el("p", { class: "note", role: "status" })];
  const show = () => {
    const runs = data.runs.map((_, i) => i).filter((i) => state.shown[i]);
    const found = keys.filter((key) => (view.all || differs(key)) && (!view.search || `${key} ${given.map((values) => values?.[key] ?? "").join(" ")}`.toLowerCase().includes(view.search)));
    head.replaceChildren(el("th", {}, "key"), ...runs.map((i) => el("th", {}, runName(i))));
    body.replaceChildren(...found.map((key) => el("tr", { class: differs(key) && view.all ? "differs" : null }, el("td", { class: "key-name mono" }, key), runs.map((i) => el("td", { class: "mono" }, given[i] ? given[i][key] ?? "–" : "(none)")))));
    const count = keys.filter(differs).length;
    status.textContent = view.all ? `${found.length} keys; ${count} differ, in bold` : `${count} of ${keys.length} keys differ between the visible runs`;
  };
  listeners.runs.push(show);
  show();
  const filters = el("div", { class: "filters" },
    el("label", {}, el("input", { type: "checkbox", onchange: (event) => { view.all = event.target.checked; show(); } }), "all keys"),
    el("label", {}, el("input", { type: "search", placeholder: "search keys and values", "aria-label": "Search keys and values", oninput: (event) => { view.search = event.target.value.toLowerCase(); show(); } })));
  return el("div", { class: "card long-card" }, filters, status, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)));
}
