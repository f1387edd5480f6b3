"use strict";
(() => {
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  // What is packed in the page is read only when it is looked at.
  async function unpack(script) {
    const bytes = Uint8Array.from(atob(script.textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  const read = new Map();
  function dataOf(article) {
    if (!read.has(article)) read.set(article, unpack(article.querySelector(".data")).then(JSON.parse));
    return read.get(article);
  }

  // ---- the table of verdicts

  const table = document.getElementById("verdict-table");
  const rows = [...table.tBodies[0].rows];
  // On a phone a row becomes a block, which takes a table's own roles away; so they are said.
  for (const row of rows) {
    row.role = "row";
    for (const cell of row.cells) cell.role = cell.tagName === "TH" ? "rowheader" : "cell";
  }
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const filters = document.getElementById("filters");

  function filter() {
    const chosen = (name) => document.getElementById(`filter-${name}`).value;
    const words = chosen("text").toLowerCase().split(/\s+/).filter(Boolean);
    const headlines = document.getElementById("filter-headline").checked;
    let shown = 0;
    for (const row of rows) {
      const fits = words.every((word) => texts.get(row).includes(word))
        && ["outcome", "kind", "section", "model"].every((name) => !chosen(name) || row.dataset[name] === chosen(name))
        && (!headlines || "headline" in row.dataset);
      row.hidden = !fits;
      shown += fits;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length} verdicts shown.`;
  }

  function sort(heading) {
    const next = { none: "ascending", ascending: "descending", descending: "none" }[heading.ariaSort];
    for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
    heading.ariaSort = next;
    const numeric = heading.firstElementChild.dataset.kind === "number";
    const value = ({ cells }) => (numeric ? cells[heading.cellIndex].dataset.value ?? "" : cells[heading.cellIndex].textContent.trim());
    const sign = next === "ascending" ? 1 : -1;
    const compare = (one, other) => {
      const [left, right] = [value(one), value(other)];
      // What has no value stands last in either direction.
      if (left === "" || right === "") return (left === "") - (right === "");
      return sign * (numeric ? left - right : left.localeCompare(right, "en", { numeric: true }));
    };
    table.tBodies[0].append(...(next === "none" ? rows : rows.toSorted(compare)));
  }

  filters.addEventListener("input", filter);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(filter));
  table.tHead.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button) sort(button.parentElement);
  });

  // ---- the panel behind a number

  const panel = document.getElementById("panel");
  let opener = null;

  function facts(names, values) {
    return make("dl", { className: "facts" }, ...names.flatMap((name, place) => [make("dt", {}, name), make("dd", {}, values[place])]));
  }

  function rowsTable({ columns, cells }, places) {
    const shown = places.map((place) => cells[place]);
    const used = columns.map((_, column) => column).filter((column) => shown.some((row) => row[column] !== null));
    const head = make("tr", {}, ...used.map((column) => make("th", { scope: "col" }, columns[column])));
    const body = shown.map((row) => make("tr", {}, ...used.map((column) => make("td", {}, String(row[column] ?? "–")))));
    const region = make("div", { className: "scroll", tabIndex: 0, ariaLabel: "Rows", role: "region" });
    region.append(make("table", { className: "rows" }, make("thead", {}, head), make("tbody", {}, ...body)));
    return region;
  }

  async function open(article, place, from) {
    const data = await dataOf(article);
    const [name, number, text, values, extra, claims, chosen, places] = data.effects[place];
    const model = data.models[number], experiment = article.dataset.experiment;
    opener = from;
    document.getElementById("panel-title").textContent = `${experiment} / ${model.label} / ${name}`;
    document.getElementById("panel-body").replaceChildren(
      make("p", { className: "value" }, text),
      facts([...data.facts, ...Object.keys(extra)], [...values, ...Object.values(extra)]),
      make("div", { innerHTML: claims.map(({ html }) => html).join("") }),
      make("h3", {}, "Rows"),
      make("p", {}, chosen),
      ...(places.length ? [rowsTable(data.rows, places)] : []),
      make("p", {}, "All rows: ", make("code", {}, `kvprobe explain ${experiment}/${model.name}/${name}`)),
      make("h3", {}, "Model"),
      make("div", { innerHTML: model.about }),
      make("h3", {}, "Experiment"),
      make("div", { innerHTML: data.origin }),
    );
    panel.showModal();
    panel.scrollTop = 0;
  }

  document.getElementById("panel-close").addEventListener("click", () => panel.close());
  panel.addEventListener("click", ({ target }) => { if (target === panel) panel.close(); });
  panel.addEventListener("close", () => opener?.focus());
  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button[data-effect]");
    if (!button) return;
    const name = button.dataset.experiment;
    open(name ? document.getElementById(`experiment-${name}`) : button.closest("article"), button.dataset.effect, button);
  });

  // ---- charts

  const themes = JSON.parse(document.getElementById("themes").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  if (matchMedia("(pointer: coarse)").matches) {
    // A finger on a chart scrolls the page.
    for (const { layout } of Object.values(themes)) Object.assign(layout, { dragmode: false, xaxis: { ...layout.xaxis, fixedrange: true } });
  }
  let library = null;

  // In a script element of its own, since the page's policy allows no evaluation.
  function plotting() {
    library ??= unpack(document.getElementById("plotly")).then((code) => {
      document.head.append(make("script", { textContent: code }));
      return window.Plotly;
    });
    return library;
  }

  function hover({ effects, models, facts: names }, place) {
    const [name, number, text, values, , claims] = effects[place];
    const fact = (wanted) => `${wanted} ${values[names.indexOf(wanted)]}`;
    return [
      `<b>${escaped(name)}</b>`,
      escaped(`${models[number].label}: ${text}`),
      escaped(["interval", "n", "clusters", "excluded"].map(fact).join("; ")),
      escaped(fact("the paper's value")),
      ...claims.map(({ statement, outcome }) => `${escaped(statement)}: <b>${outcome}</b>`),
      "<i>click for details</i>",
    ].join("<br>");
  }

  async function draw(article, element, chart) {
    const Plotly = await plotting(), all = await dataOf(article), first = !element.classList.contains("js-plotly-plot");
    // Plotly writes into what it is given.
    const { data, layout } = structuredClone(chart.figure);
    for (const trace of data) trace.hovertext = trace.customdata.map((place) => hover(all, place));
    const template = themes[dark.matches ? "dark" : "light"];
    await Plotly.react(element, data, { ...layout, template }, { displayModeBar: false, responsive: true });
    if (first) element.on("plotly_click", ({ points }) => open(article, points[0].customdata, article.querySelector("select")));
  }

  function numbersOf({ effects, models }, { label, effects: shown }) {
    const head = make("tr", {}, ...["effect", ...models.map((model) => model.label)].map((name) => make("th", { scope: "col" }, name)));
    const body = shown.map((name) => make("tr", {}, make("th", { scope: "row" }, make("code", {}, name)), ...models.map((_, number) => {
      const place = effects.findIndex((effect) => effect[0] === name && effect[1] === number);
      if (place < 0) return make("td", {}, "–");
      const button = make("button", { type: "button", className: "number" }, effects[place][2]);
      button.dataset.effect = place;
      return make("td", {}, button);
    })));
    return make("table", {}, make("caption", {}, label), make("thead", {}, head), make("tbody", {}, ...body));
  }

  const whenOpened = (details, fill) => details?.addEventListener("toggle", () => { if (details.open) fill(details.querySelector("div")); });

  for (const article of document.querySelectorAll("article")) {
    const element = article.querySelector(".figure"), choice = article.querySelector("select"), numbers = article.querySelector(".numbers");
    whenOpened(article.querySelector(".origin"), async (place) => { place.innerHTML = (await dataOf(article)).origin; });
    whenOpened(article.querySelector(".stored"), async (place) => {
      if (place.firstChild) return;
      const svg = await unpack(article.querySelector(".stored script"));
      place.append(make("img", { src: `data:image/svg+xml,${encodeURIComponent(svg)}`, alt: `The stored figure of ${article.dataset.experiment}` }));
    });
    if (!element) continue;
    const chart = async () => (await dataOf(article)).charts[choice.value];
    const tabulate = async () => { numbers.querySelector("div").replaceChildren(numbersOf(await dataOf(article), await chart())); };
    // Room is kept for what is not drawn yet: a link to an experiment further down must not be led astray.
    const reserve = async () => { element.style.minHeight = `${(await chart()).figure.layout.height}px`; };
    let seen = false;
    const redraw = async () => { if (seen) await draw(article, element, await chart()); };
    choice.addEventListener("change", () => { reserve(); redraw(); if (numbers.open) tabulate(); });
    whenOpened(numbers, tabulate);
    dark.addEventListener("change", redraw);
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      seen = true;
      redraw();
    }, { rootMargin: "400px" }).observe(element);
  }
  // A link to an experiment or to the verdicts opens what is folded there.
  function unfold(hash) {
    const target = hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1)));
    const fold = target && target.querySelector(":scope > .fold");
    if (!fold) return;
    fold.open = true;
    target.scrollIntoView();
  }
  document.addEventListener("click", ({ target }) => {
    const link = target.closest('a[href^="#"]');
    if (link) unfold(link.hash);
  });
  addEventListener("hashchange", () => unfold(location.hash));
  unfold(location.hash);

  // Browsers keep what a form held when a page is loaded again.
  filter();
})();
