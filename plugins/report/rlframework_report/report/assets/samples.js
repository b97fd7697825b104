// Samples over time. Prompts and completions are only set as text.
const PAGE_SIZE = innerWidth < 760 ? 10 : 20;

function samples() {
  const all = data.runs.flatMap((run, index) => run.samples.rows.map(([step, kind, prompt, completion, reward, extra, turns]) => ({ run: index, step, kind, prompt: run.samples.prompts[prompt], images: run.samples.prompt_images?.[prompt] ?? [], completion, reward, extra, turns: turns ?? null })));
  if (!all.length) return el("section", { id: "samples" }, el("h2", {}, "Samples"), el("p", { class: "note" }, "No samples were recorded: observers.samples is 0, or the run has not produced any yet."));
  const rewards = all.map((row) => row.reward).filter((value) => value !== null);
  const range = [rewards.reduce((a, b) => Math.min(a, b), 0), rewards.reduce((a, b) => Math.max(a, b), -Infinity)];
  const kinds = [...new Set(all.map((row) => row.kind))];
  const view = { kind: kinds.includes("validation") ? "validation" : "", step: null, search: "", prompt: null, order: "new", count: PAGE_SIZE };
  const body = el("tbody");
  const status = el("p", { class: "note", role: "status" });
  const more = el("button", { type: "button", class: "plain more", onclick: () => { view.count += PAGE_SIZE; show(); } }, "Show more");
  const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step of the samples" });
  const word = el("output");
  const allSteps = el("button", { type: "button", class: "plain", onclick: () => { view.step = view.step === null ? stepsOf().at(-1) ?? null : null; renew(); } }, "all steps");
  const prompt = el("button", { type: "button", class: "plain", hidden: true, title: "Show all prompts", onclick: () => { view.prompt = null; renew(); } });
  const choose = (label, options, change, value) => el("label", {}, label, el("select", { onchange: (event) => { change(event.target.value); renew(); } }, options.map(([key, text]) => el("option", { value: key, selected: key === value }, text))));
  const fits = (row) => state.shown[row.run] && (!view.kind || row.kind === view.kind) && (view.prompt === null || (row.prompt === view.prompt.prompt && row.images.join() === view.prompt.images.join()));
  const stepsOf = () => [...new Set(all.filter(fits).map((row) => row.step))].sort((a, b) => a - b);
  slider.addEventListener("input", () => { view.step = stepsOf()[Number(slider.value)]; renew(); });

  function renew() {
    view.count = PAGE_SIZE;
    const steps = stepsOf();
    if (view.step !== null && steps.length) view.step = steps[nearest(steps, view.step)];
    slider.max = Math.max(0, steps.length - 1);
    slider.disabled = steps.length < 2;
    slider.value = view.step === null ? steps.length - 1 : steps.indexOf(view.step);
    word.textContent = view.step === null ? "all" : view.step.toLocaleString("en");
    allSteps.setAttribute("aria-pressed", view.step === null);
    prompt.hidden = view.prompt === null;
    const only = view.prompt?.prompt ?? "";
    prompt.textContent = `× one prompt: ${only.length > 40 ? `${only.slice(0, 40)}…` : only}`;
    show();
  }

  function show() {
    const needle = view.search.toLowerCase();
    const found = all.filter((row) => fits(row) && (view.step === null || row.step === view.step) && (!needle || textsOf(row).toLowerCase().includes(needle)));
    const by = { new: (a, b) => b.step - a.step || a.run - b.run, old: (a, b) => a.step - b.step || a.run - b.run, best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.step - a.step, worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.step - a.step };
    found.sort(by[view.order]);
    body.replaceChildren(...found.slice(0, view.count).map((row) => sampleRow(row, range, one)));
    more.hidden = found.length <= view.count;
    const mean = found.filter((row) => row.reward !== null);
    status.textContent = `${found.length.toLocaleString("en")} samples${mean.length ? `, mean reward ${number(mean.reduce((sum, row) => sum + row.reward, 0) / mean.length)}` : ""}${found.length > view.count ? `; the first ${view.count} are shown` : ""}`;
  }

  function one(row) {
    Object.assign(view, { prompt: row, step: null, order: "old" });
    section.querySelector("[data-order] select").value = "old";
    renew();
  }

  const order = choose("Order", [["new", "latest first"], ["old", "earliest first"], ["best", "highest reward"], ["worst", "lowest reward"]], (value) => { view.order = value; }, "new");
  order.setAttribute("data-order", "");
  const filters = el("div", { class: "filters" },
    kinds.length > 1 ? choose("From", [["", "all"], ...kinds.map((kind) => [kind, { train: "training", validation: "held out" }[kind] ?? kind])], (value) => { view.kind = value; }, view.kind) : null,
    el("label", { class: "steps" }, "Step", slider, word), allSteps, order,
    el("label", {}, el("input", { type: "search", placeholder: "search texts", "aria-label": "Search prompts and completions", oninput: (event) => { view.search = event.target.value; show(); } })), prompt);
  const head = el("tr", {}, ["step", ...(data.runs.length > 1 ? ["run"] : []), "from", "prompt", "completion"].map((text) => el("th", { class: { step: "n", prompt: "long", completion: "long" }[text] ?? null }, text)), el("th", {}, "reward"));
  const table = el("div", { class: "scroll" }, el("table", { class: "samples" }, el("thead", {}, head), body));
  const left = data.runs.reduce((sum, run) => sum + run.samples.total - run.samples.rows.length, 0);
  const thinned = left ? el("p", { class: "note" }, `To keep this page small, ${left.toLocaleString("en")} samples are omitted; it shows complete, evenly spaced steps. samples.jsonl contains all samples.`) : null;
  const section = el("section", { id: "samples" }, el("h2", {}, "Samples"), el("div", { class: "card long-card" }, filters, status, table, more), thinned);
  listeners.runs.push(renew);
  renew();
  return section;
}

function sampleRow(row, range, one) {
  const again = el("button", { type: "button", class: "link fold", title: "Show this prompt at all steps", onclick: () => one(row) }, "over time");
  const extra = Object.entries(row.extra).map(([name, value]) => el("div", { class: "extra" }, `${name}: ${value}`));
  return el("tr", {},
    el("td", { class: "n", "data-word": "step" }, row.step.toLocaleString("en")),
    data.runs.length > 1 ? el("td", {}, runName(row.run, row.kind === "validation")) : null,
    el("td", { class: "tag" }, { train: "training", validation: "held out" }[row.kind] ?? row.kind),
    el("td", { class: "long", "data-word": "prompt" }, pictures(row, row.images), el("div", { class: "prompt" }, folded(row.prompt), again)),
    el("td", { class: "long", "data-word": "completion" }, row.turns ? episode(row) : folded(row.completion), extra),
    el("td", { "data-word": "reward" }, rewardCell(row.reward, range)));
}

// The images `names` of a prompt or turn, in their order. Those that the page has no room for are named.
function pictures(row, names) {
  const known = data.runs[row.run].samples.images ?? {};
  return names.length ? el("div", { class: "pictures" }, names.map((name) => known[name] ? el("img", { src: known[name], alt: "image that the model saw" }) : el("span", { class: "empty" }, "(image omitted)"))) : null;
}

function textsOf(row) {
  return [row.prompt, row.completion, ...(row.turns ?? []).flatMap((turn) => [turn.text, turn.reasoning ?? "", ...(turn.calls ?? [])])].join("\n");
}

// An episode turn by turn; the model's turns are marked, and called trained where they are in the loss.
function episode(row) {
  const word = (turn) => turn.trained && row.kind === "train" ? "trained" : turn.trained || turn.sampled ? "sampled" : "masked";
  return el("ol", { class: "turns" }, row.turns.map((turn) => {
    const facts = [word(turn), ...(turn.row ? [`row ${turn.row}`] : []), ...(turn.reward === undefined ? [] : [`reward ${number(turn.reward)}`])];
    return el("li", { class: turn.trained || turn.sampled ? "trained" : null },
      el("div", { class: "extra" }, el("b", {}, turn.role), ` ${facts.join(", ")}`),
      turn.reasoning ? el("div", { class: "extra" }, folded(turn.reasoning)) : null,
      pictures(row, turn.images ?? []),
      turn.text || !(turn.calls || turn.images) ? folded(turn.text) : null,
      (turn.calls ?? []).map((call) => el("div", { class: "text mono call" }, call)));
  }));
}

function folded(text) {
  if (!text) return el("span", { class: "empty" }, "(empty)");
  const node = el("div", { class: "text mono", dir: "auto" }, text);
  if (text.length < 420 && text.split("\n").length < 7) return node;
  node.classList.add("clamp");
  const open = el("button", { type: "button", class: "link fold", onclick: () => { const shut = node.classList.toggle("clamp"); open.textContent = shut ? "show all" : "show less"; } }, "show all");
  return el("div", {}, node, open, " ");
}

function rewardCell(reward, [low, high]) {
  const fill = el("i");
  const share = reward === null || !(high > low) ? 0 : (reward - low) / (high - low);
  fill.style.width = `${Math.round(100 * share)}%`;
  return el("span", { class: "reward" }, el("span", { class: "meter", "aria-hidden": "true" }, fill), number(reward));
}
