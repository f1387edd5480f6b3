"use strict";
(() => {
  const { outcomes, experiments } = JSON.parse(document.getElementById("data").textContent);
  const SYMBOLS = ["circle", "square", "triangle-up", "pentagon", "hexagon", "star"];
  // Heights in pixels: of the label of an effect, of each model below it, and of a figure's legend and axis.
  const LABEL = 24, STEP = 15, GAP = 8, AROUND = 120;

  for (const experiment of experiments) {
    experiment.effects = experiment.effects.map((values) =>
      Object.fromEntries(experiment.fields.map((name, place) => [name, values[place]])));
  }

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  function facts(pairs) {
    const list = make("dl", { className: "facts" });
    for (const [name, value] of pairs) {
      if (value === null || value === undefined || value === "") continue;
      list.append(make("dt", {}, name), make("dd", {}, value instanceof Node ? value : String(value)));
    }
    return list;
  }

  function badge(name) {
    const { kind, mark } = outcomes.find((outcome) => outcome.name === name);
    const sign = make("span", {}, mark);
    sign.ariaHidden = "true";
    return make("span", { className: `badge ${kind}` }, sign, ` ${name}`);
  }

  function scrolling(label, ...children) {
    const region = make("div", { className: "scroll", tabIndex: 0, ariaLabel: label }, ...children);
    region.setAttribute("role", "region");
    return region;
  }

  // What is packed in the page is read only when it is looked at.
  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  // ---- the table of verdicts

  const table = document.getElementById("verdict-table");
  const rows = [...table.tBodies[0].rows];
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const filters = document.getElementById("filters");

  function filter() {
    const chosen = (name) => document.getElementById(`filter-${name}`).value;
    const words = chosen("text").toLowerCase().split(/\s+/).filter(Boolean);
    const headlines = document.getElementById("filter-headline").checked;
    let shown = 0;
    for (const row of rows) {
      const fits = words.every((word) => texts.get(row).includes(word))
        && ["outcome", "section", "model"].every((name) => !chosen(name) || row.dataset[name] === chosen(name))
        && (!headlines || "headline" in row.dataset);
      row.hidden = !fits;
      shown += fits;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length} verdicts shown.`;
  }

  function compare(column, numeric) {
    const value = (row) => {
      const cell = row.cells[column];
      return numeric ? cell.dataset.value : cell.textContent.trim();
    };
    return (a, b, sign) => {
      const [left, right] = [value(a), value(b)];
      // What has no value stands last in either direction.
      if (left === "" || right === "") return (left === "") - (right === "");
      return sign * (numeric ? Number(left) - Number(right) : left.localeCompare(right, "en", { numeric: true }));
    };
  }

  function sort(heading) {
    const next = { none: "ascending", ascending: "descending", descending: "none" }[heading.ariaSort];
    for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
    heading.ariaSort = next;
    const by = compare(heading.cellIndex, heading.firstElementChild.dataset.kind === "number");
    const sign = next === "ascending" ? 1 : -1;
    table.tBodies[0].append(...(next === "none" ? rows : rows.toSorted((a, b) => by(a, b, sign))));
  }

  filters.addEventListener("input", filter);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(filter));
  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) sort(button.parentElement);
  });

  // ---- the panel behind a number

  const panel = document.getElementById("panel");
  let opener = null;

  function claimsOn(experiment, effect) {
    const model = experiment.models[effect.model].name;
    return experiment.claims.filter((claim) => claim.effect === effect.name).map((claim) => ({
      ...claim, verdict: experiment.verdicts.find((each) => each.claim === claim.id && each.model === model),
    })).filter((claim) => claim.verdict);
  }

  function unitOf(effect) {
    return effect.unit === "fraction" ? "" : ` ${effect.unit}`;
  }

  function explained(experiment, effect) {
    const model = experiment.models[effect.model];
    const kind = effect.method === "range" ? "range of the clusters" : "interval";
    return [
      make("p", { className: "value" }, effect.text + unitOf(effect)),
      facts([
        ["unit", effect.unit],
        [kind, effect.method === "range" ? "too few clusters for an interval" : `${+(100 * effect.confidence).toFixed(2)}%, ${effect.method}`],
        ["n", effect.n],
        ["clusters", `${effect.clusters} (by ${experiment.cluster})`],
        ["excluded", effect.excluded],
        ["noise floor", effect.noise_floor],
        ["seed", `${effect.seed ?? "no draws for the interval"}; task ${experiment.seeds.task ?? "none"}, statistics ${experiment.seeds.statistics}`],
        ["the paper's value", effect.paper === null ? "none given" : `${effect.paper}${model.paper ? ` (beside ${model.paper})` : ""}`],
        ...Object.entries(effect.extra).map(([name, value]) => [name.replaceAll("_", " "), value]),
      ]),
      ...claimsOn(experiment, effect).flatMap((claim) => [
        make("h3", {}, `${claim.headline ? "★ " : ""}Claim ${claim.id}`),
        make("p", {}, make("code", {}, claim.statement), " ", badge(claim.verdict.outcome), ` ${claim.verdict.reason}`),
        facts([["source", claim.source], ["p", `${claim.verdict.p}; adjusted ${claim.verdict.adjusted}${claim.verdict.survives ? "" : " († not after adjustment)"}`]]),
      ]),
      make("h3", {}, "Rows behind it"),
      ...rowsBehind(experiment, effect),
      make("h3", {}, "Model"),
      facts([["name", model.name], ...Object.entries(model.identity).filter(([name]) => name !== "name").map(([name, value]) => [name.replaceAll("_", " "), value]), ["gate", model.reason]]),
      make("h3", {}, "Experiment"),
      ...origin(experiment, `${experiment.name}/${model.name}/${effect.name}`),
    ];
  }

  function rowsBehind(experiment, effect) {
    if (effect.rows.length === 0) return [make("p", {}, "The run's rows could not be read.")];
    const how = effect.chosen.length
      ? `${effect.matched} rows that count are named after it (${effect.chosen.join(", ")})`
      : `No column is named after it; it is made of the ${effect.matched} rows of the model that count`;
    const shown = effect.rows.map((place) => experiment.rows.cells[place]);
    const columns = experiment.rows.columns.map((name, place) => [name, place])
      .filter(([, place]) => shown.some((row) => row[place] !== null));
    const head = make("tr", {}, ...columns.map(([name]) => make("th", { scope: "col" }, name)));
    const body = shown.map((row) => make("tr", {}, ...columns.map(([, place]) => make("td", {}, String(row[place] ?? "–")))));
    return [
      make("p", {}, `${how}; the first ${shown.length}:`),
      scrolling("Rows", make("table", { className: "rows" }, make("thead", {}, head), make("tbody", {}, ...body))),
    ];
  }

  function origin(experiment, target) {
    const { code = {}, packages = {}, threads } = experiment.provenance;
    const changes = code.dirty === undefined || code.dirty === null ? "" : code.dirty ? ", with uncommitted changes" : ", no uncommitted changes";
    return [
      facts([
        ["again", make("code", {}, experiment.command)],
        ["rows", make("code", {}, target ? `kvprobe explain ${target}` : `kvprobe explain ${experiment.name}`)],
        ["experiment", `${experiment.name}, hash ${experiment.hash}`],
        ["profile", experiment.profile],
        ["code", `kvprobe ${code.version ?? "unknown"}, ${code.commit ? `commit ${code.commit}${changes}` : "no commit"}`],
        ["packages", Object.entries(packages).map((pair) => pair.join(" ")).join(", ")],
        ["threads", threads],
        ["folder", experiment.folder],
      ]),
      make("details", {}, make("summary", {}, "The resolved YAML"), scrolling("The resolved YAML", make("pre", {}, experiment.config))),
    ];
  }

  function open(experiment, effect, from) {
    opener = from;
    const model = experiment.models[effect.model];
    document.getElementById("panel-title").textContent = `${experiment.name} / ${model.label} / ${effect.name}`;
    document.getElementById("panel-body").replaceChildren(...explained(experiment, effect));
    panel.showModal();
    panel.scrollTop = 0;
  }

  document.getElementById("panel-close").addEventListener("click", () => panel.close());
  panel.addEventListener("click", (event) => { if (event.target === panel) panel.close(); });
  panel.addEventListener("close", () => opener?.focus());
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-number]");
    if (!button) return;
    const [experiment, effect] = button.dataset.number.split(",").map(Number);
    open(experiments[experiment], experiments[experiment].effects[effect], button);
  });

  // ---- figures

  const escaped = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  let library = null;

  // In a script element of its own, since the page's policy allows no evaluation.
  function plotting() {
    library ??= unpack(document.getElementById("plotly").textContent).then((code) => {
      document.head.append(make("script", { textContent: code }));
      return window.Plotly;
    });
    return library;
  }

  const lineHeight = (experiment) => LABEL + STEP * experiment.models.length + GAP;
  const figureHeight = (experiment, view) => lineHeight(experiment) * view.effects.length + AROUND;

  function viewed(experiment, view) {
    const lines = view.effects.map((name) => experiment.effects.map((effect, place) => ({ effect, place }))
      .filter(({ effect }) => effect.name === name));
    return { view, lines, claims: view.effects.map((name) => experiment.claims.filter((claim) => claim.effect === name)) };
  }

  function rangeOf({ lines, claims }) {
    const effects = lines.flat().map(({ effect }) => effect);
    const inner = [...effects.flatMap((effect) => [effect.estimate, effect.paper]), ...claims.flat().flatMap((claim) => claim.regions.flat())]
      .filter((value) => value !== null);
    let [low, high] = [Math.min(...inner), Math.max(...inner)];
    const span = high - low || Math.abs(high) || 1;
    // An interval far wider than what else is shown leaves the picture, and does not flatten all others.
    for (const effect of effects) {
      if (effect.low !== null) low = Math.min(low, Math.max(effect.low, Math.min(...inner) - span));
      if (effect.high !== null) high = Math.max(high, Math.min(effect.high, Math.max(...inner) + span));
    }
    const pad = 0.06 * (high - low || span);
    return [low - pad, high + pad];
  }

  function hover(experiment, effect) {
    const model = experiment.models[effect.model];
    return [
      `<b>${escaped(effect.name)}</b>`,
      `${escaped(model.label)}: ${escaped(effect.text + unitOf(effect))}`,
      `${escaped(effect.method)}; n ${effect.n}, clusters ${effect.clusters}, excluded ${effect.excluded}`,
      ...(effect.paper === null ? [] : [`the paper: ${effect.paper}${model.paper ? ` (${escaped(model.paper)})` : ""}`]),
      ...claimsOn(experiment, effect).map((claim) => `${escaped(claim.statement)}: <b>${claim.verdict.outcome}</b>`),
      "<i>click for where it comes from</i>",
    ].join("<br>");
  }

  function traces(experiment, shown, range, height) {
    const far = 20 * (range[1] - range[0]);
    const y = (line, model) => -line - (LABEL + STEP * (model + 0.5)) / height;
    const ends = (effect) => [effect.low ?? effect.estimate - far, effect.high ?? effect.estimate + far];
    const models = experiment.models.map((model, number) => {
      const own = shown.lines.flatMap((line, place) => line.filter(({ effect }) => effect.model === number).map((each) => ({ ...each, y: y(place, number) })));
      const symbol = SYMBOLS[model.place % SYMBOLS.length];
      return {
        type: "scatter", mode: "markers", name: escaped(model.label), hoverinfo: "text", showlegend: own.length > 0,
        x: own.map(({ effect }) => effect.estimate),
        y: own.map((each) => each.y),
        text: own.map(({ effect }) => hover(experiment, effect)),
        customdata: own.map(({ place }) => place),
        error_x: {
          type: "data", symmetric: false, color: model.color, thickness: 2, width: 0,
          array: own.map(({ effect }) => ends(effect)[1] - effect.estimate),
          arrayminus: own.map(({ effect }) => effect.estimate - ends(effect)[0]),
        },
        marker: {
          color: model.color, size: 10, line: { width: 1, color: color("ink") },
          symbol: own.map(({ effect }) => effect.method === "range" ? `${symbol}-open` : symbol),
        },
      };
    });
    const given = shown.lines.flatMap((line, place) => line.filter(({ effect }) => effect.paper !== null).map((each) => ({ ...each, y: y(place, each.effect.model) })));
    const paper = {
      type: "scatter", mode: "markers", name: "the paper's value", hoverinfo: "text", showlegend: given.length > 0,
      x: given.map(({ effect }) => effect.paper),
      y: given.map((each) => each.y),
      text: given.map(({ effect }) => hover(experiment, effect)),
      customdata: given.map(({ place }) => place),
      marker: { symbol: "diamond-open", size: 13, color: color("ink"), line: { width: 1.5 } },
    };
    return [...models, paper];
  }

  function layout(experiment, shown, range, height) {
    const far = 20 * (range[1] - range[0]);
    const coarse = matchMedia("(pointer: coarse)").matches;
    const shapes = [], annotations = [];
    shown.view.effects.forEach((name, line) => {
      const [top, bottom] = [-line - 0.5 * LABEL / height, -line - 1 + 0.5 * GAP / height];
      const claims = shown.claims[line];
      for (const [low, high] of claims.flatMap((claim) => claim.regions)) {
        const [x0, x1] = [low ?? range[0] - far, high ?? range[1] + far];
        shapes.push({ type: "rect", layer: "below", x0, x1, y0: top - 0.5 * LABEL / height, y1: bottom, line: { width: 0 }, fillcolor: color("region") });
        for (const end of [low, high].filter((value) => value !== null)) {
          shapes.push({ type: "line", layer: "below", x0: end, x1: end, y0: top - 0.5 * LABEL / height, y1: bottom, line: { width: 1.5, dash: "dot", color: color("link") } });
        }
      }
      const label = claims.length === 1 ? `${claims[0].headline ? "★ " : ""}${claims[0].statement}` : name;
      annotations.push({ text: escaped(label), x: 0, xref: "paper", xanchor: "left", y: top, yanchor: "middle", showarrow: false, font: { size: 12 }, bgcolor: color("ground"), borderpad: 1 });
    });
    return {
      height: figureHeight(experiment, shown.view), margin: { l: 8, r: 8, t: 60, b: 50 },
      paper_bgcolor: color("ground"), plot_bgcolor: color("ground"), font: { color: color("ink"), family: "system-ui, sans-serif" },
      hovermode: "closest", hoverlabel: { align: "left" }, dragmode: coarse ? false : "zoom",
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 12 } },
      xaxis: { range, title: { text: escaped(shown.view.unit) }, gridcolor: color("line"), zerolinecolor: color("muted"), fixedrange: coarse },
      yaxis: { range: [-shown.lines.length, 0], visible: false, fixedrange: true },
      shapes, annotations,
    };
  }

  async function draw(experiment, element, view) {
    const Plotly = await plotting();
    const shown = viewed(experiment, view);
    const range = rangeOf(shown), height = lineHeight(experiment);
    const first = !element.classList.contains("js-plotly-plot");
    await Plotly.react(element, traces(experiment, shown, range, height), layout(experiment, shown, range, height), { displayModeBar: false, responsive: true });
    if (first) {
      element.on("plotly_click", ({ points }) => open(experiment, experiment.effects[points[0].customdata], element.closest("article").querySelector("select")));
    }
  }

  function numbers(experiment, number, view) {
    const { lines } = viewed(experiment, view);
    const head = make("tr", {}, ...["effect", ...experiment.models.map((model) => model.label)].map((name) => make("th", { scope: "col" }, name)));
    const body = view.effects.map((name, place) => make("tr", {}, make("th", { scope: "row" }, make("code", {}, name)), ...experiment.models.map((_, model) => {
      const found = lines[place].find(({ effect }) => effect.model === model);
      if (!found) return make("td", {}, "–");
      const button = make("button", { type: "button", className: "number" }, found.effect.text);
      button.dataset.number = `${number},${found.place}`;
      const paper = found.effect.paper === null ? null : make("span", { className: "note" }, ` paper ${found.effect.paper}`);
      return make("td", {}, button, paper);
    })));
    const caption = make("caption", {}, view.label);
    return make("table", {}, caption, make("thead", {}, head), make("tbody", {}, ...body));
  }

  function whenOpened(details, fill) {
    details?.addEventListener("toggle", () => { if (details.open) fill(details.querySelector("div")); });
  }

  for (const article of document.querySelectorAll("article")) {
    const number = experiments.findIndex((experiment) => experiment.name === article.dataset.experiment);
    const experiment = experiments[number];
    const element = article.querySelector(".figure");
    whenOpened(article.querySelector(".origin"), (place) => place.replaceChildren(...origin(experiment, "")));
    whenOpened(article.querySelector(".stored"), async (place) => {
      if (place.firstChild) return;
      const svg = await unpack(article.querySelector(".stored script").textContent);
      place.append(make("img", { src: `data:image/svg+xml,${encodeURIComponent(svg)}`, alt: `The stored figure of ${experiment.name}: ${experiment.question}` }));
    });
    if (!element) continue;
    const choice = article.querySelector(".view-choice");
    choice.append(...experiment.views.map((view, place) => make("option", { value: place }, view.label)));
    const table = article.querySelector(".numbers");
    const view = () => experiment.views[choice.value];
    const tabulate = () => { if (table.open) table.querySelector("div").replaceChildren(numbers(experiment, number, view())); };
    let seen = false;
    const redraw = () => { if (seen) draw(experiment, element, view()); };
    // Room is kept for what is not drawn yet: a link to an experiment further down must not be led astray.
    const reserve = () => { element.style.minHeight = `${figureHeight(experiment, view())}px`; };
    reserve();
    choice.addEventListener("change", () => { reserve(); redraw(); tabulate(); });
    table.addEventListener("toggle", tabulate);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      seen = true;
      redraw();
    }, { rootMargin: "400px" }).observe(element);
  }
  // Browsers keep what a form held when a page is loaded again.
  filter();
})();
