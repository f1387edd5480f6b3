"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const box = at("tokens"), now = at("now"), kept = at("kept"), methods = at("method");

  let file = document.querySelector("main").dataset.file;
  let choice = {}, prompt = null, bars = {}, chosen = new Set(), strongest = [], keptShown = "", asking = null, saved = null;

  // ---- asking: one state at a time; the server sends what it finds as it finds it

  async function* answers(body, signal) {
    const response = await fetch(`show${location.search}`, { method: "POST", body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error((await response.text()).replace(/^\{"message":"(.*)"\}$/, "$1"));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const events = (text + piece.value).split("\n\n");
      text = events.pop();
      for (const event of events) yield JSON.parse(event.replace(/^data: /, ""));
    }
  }

  // Returns whether all of the state was shown.
  async function show(body) {
    asking?.abort();
    const mine = asking = new AbortController();
    now.classList.add("old");
    now.ariaBusy = "true";
    at("keep").disabled = true;
    let whole = false;
    try {
      for await (const event of answers({ file, choice, ...body }, mine.signal)) {
        if (mine !== asking) return false;
        take[event.event](event);
        whole = event.event === "done";
      }
      if (!whole && at("problem").hidden) take.error({ message: "The measurement was ended by another page; change something to ask again." });
    } catch (error) {
      if (mine.signal.aborted) return false;
      take.error({ message: error instanceof TypeError ? "kvprobe does not answer; is `kvprobe explore` still running?" : error.message });
    }
    return whole;
  }

  // A file may hold a second state to stand beside; it is shown first and put there.
  async function open(text) {
    if (!await show({ file: text, choice: null }) || !choice.kept || keptShown === JSON.stringify(choice.kept)) return;
    const whole = file, wanted = choice.kept;
    if (await show({ file: JSON.stringify(wanted), choice: null })) putBeside(wanted);
    await show({ file: whole, choice: null });
  }

  const choose = (changed) => { choice = { ...choice, ...changed }; return show({}); };

  // ---- taking what the server says

  const take = {
    state(event) {
      file = event.file;
      choice = JSON.parse(file).explore;
      if (document.activeElement !== at("prompt")) at("prompt").value = event.prompt;
      const bytes = new TextEncoder().encode(JSON.stringify(JSON.parse(file)));
      const link = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
      history.replaceState(null, "", `#${link}`);
      at("link").href = location.href;
      if (saved) URL.revokeObjectURL(saved);
      at("save").href = saved = URL.createObjectURL(new Blob([file], { type: "application/json" }));
      at("problem").hidden = true;
    },
    progress({ stage, fraction }) {
      if (fraction === null) at("progress").removeAttribute("value"); else at("progress").value = fraction;
      at("status").textContent = `${stage} …`;
    },
    prompt(event) {
      prompt = event;
      bars = { old: event.old, new: event.new };
      at("field").replaceChildren(...event.fields.map(({ name }) => make("option", { selected: name === event.field }, name)));
      at("field-label").hidden = event.fields.length < 2;
      at("field-name").textContent = event.field;
      const field = event.fields.find(({ name }) => name === event.field);
      at("old").textContent = field.old;
      if (document.activeElement !== at("value")) at("value").value = field.new;
      at("save").download = `${event.name}.json`;
      at("warnings").replaceChildren(...event.warnings.map((text) => make("p", { className: "note" }, text)));
      if (event.problem) take.told(event.problem);
      for (const radio of document.getElementsByName("part")) radio.checked = radio.value === (choice.part ?? "both");
      const [first, last, most] = event.layers;
      for (const [id, value] of [["first", first], ["last", last]]) Object.assign(at(id), { max: most, value });
      methods.value = choice.method ?? "erratum";
      drawTokens(event.tokens);
      // Colours of another value, part or band stay on no token.
      const told = JSON.stringify([event.field, field.new, event.layers, choice.part]);
      if (told !== colored) for (const token of options()) token.style.cssText = "";
      colored = told;
      document.querySelector(".controls").hidden = !event.end;
      at("transplant").hidden = !event.end;
      select(new Set(event.positions));
    },
    transplant(event) {
      bars.transplant = event.bar;
      at("transplant").innerHTML = event.receipt;
      drawBars();
      now.classList.remove("old");
    },
    edit(event) {
      bars.edit = event.bar ?? null;
      const { line, before } = event.erratum;
      const shown = make("div");
      if (event.impossible) shown.append(make("p", { className: "note" }, event.impossible));
      else {
        shown.append(make("p", { className: "note" }, `${(100 * event.share).toFixed(0)} % of the FLOPs of a new prefill.`), make("div", { innerHTML: event.receipt }));
        shown.append(make("details", {}, make("summary", {}, "The edited prompt; in bold what was run anew"), make("div", { innerHTML: event.tokens })));
      }
      shown.append(make("p", { className: "erratum" }, "An erratum reads ", make("code", {}, line), `, in front of ${before}.`));
      at("edit").replaceChildren(shown);
      drawBars();
      now.classList.remove("old");
    },
    heat({ styles, titles, limit, strongest: found }) {
      strongest = found;
      at("scale").textContent = `, full colour at ${limit.toFixed(2)}; blue where negative`;
      [...options()].forEach((token, place) => {
        token.style.cssText = styles[place];
        token.title = token.ariaLabel = titles[place];
      });
    },
    done({ seconds }) {
      at("progress").value = 1;
      at("status").textContent = `Measured in ${seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`}.`;
      at("keep").disabled = false;
      now.ariaBusy = "false";
    },
    told(message) {
      at("problem").textContent = message;
      at("problem").hidden = false;
    },
    error({ message }) {
      take.told(message);
      at("status").textContent = "";
      at("progress").value = 0;
      now.ariaBusy = "false";
    },
  };

  // ---- bars

  const percent = (share) => `${(100 * share).toFixed(share > 0.001 && share < 0.999 ? 1 : 0)} %`;

  const signed = (number) => number.toFixed(2).replace(/^-0\.00$/, "0.00").replace("-", "−");

  function color(answer) {
    const place = prompt.contrast.indexOf(answer);
    return place < 0 ? "#999999" : ["#0072B2", "#D55E00"][place];
  }

  function drawBars() {
    const field = prompt.fields.find(({ name }) => name === prompt.field);
    const labels = { old: `${field.old} (cached)`, new: `${field.new} (new prefill)`, transplant: "transplant", edit: `edit: ${methods.value}` };
    const rows = Object.entries(bars).filter(([, bar]) => bar).map(([kind, bar]) => {
      const shares = Object.entries(bar.probabilities);
      const told = [`${bar.answer} ${percent(bar.probabilities[bar.answer])}`, `margin ${signed(bar.margin)}`];
      if (bar.recovery !== null && ["transplant", "edit"].includes(kind)) told.push(`recovery ${signed(bar.recovery)}`);
      if (bar.probabilities[bar.answer] < 0.5) told.push(`likeliest token ${JSON.stringify(bar.says)}`);
      const parts = shares.map(([answer, share]) => {
        const part = make("span", { title: `${answer} ${percent(share)}` });
        part.style.cssText = `width: ${100 * share}%; background: ${color(answer)}`;
        return part;
      });
      const drawn = make("div", { className: "shares", role: "img", ariaLabel: shares.map(([answer, share]) => `${answer} ${percent(share)}`).join(", ") }, ...parts);
      const row = make("div", { className: "decision" }, make("span", {}, labels[kind]), make("span", { className: "told" }, told.join(" · ")), drawn);
      row.dataset.kind = kind;
      return row;
    });
    const legend = make("p", { className: "legend" }, ...prompt.answers.map((answer) => {
      const mark = make("i");
      mark.style.background = color(answer);
      return make("span", {}, mark, answer);
    }));
    const [old, other] = prompt.contrast;
    legend.append(`margin: logit of ${other} less that of ${old}`);
    at("bars").replaceChildren(...rows, legend);
  }

  // ---- tokens: a list box of which any set can be chosen

  let drawn = "", colored = "", active = 0, anchor = 0, dragged = null;
  const options = () => box.querySelectorAll(".token");
  const open_ = (place) => place < prompt.end;

  function drawTokens(html) {
    if (html + prompt.end === drawn) return;
    drawn = html + prompt.end;
    box.innerHTML = html;
    const list = box.firstElementChild;
    Object.assign(list, { role: "listbox", tabIndex: 0, ariaMultiSelectable: "true", ariaLabel: "Tokens of the prompt" });
    [...options()].forEach((token, place) => {
      Object.assign(token, { role: "option", id: `token-${place}`, ariaLabel: token.title });
      if (!open_(place)) token.ariaDisabled = "true";
    });
    move(Math.min(prompt.span[0], prompt.end - 1));
    anchor = active;
  }

  function select(places) {
    chosen = places;
    [...options()].forEach((token, place) => {
      token.classList.toggle("chosen", places.has(place));
      token.ariaSelected = String(places.has(place));
    });
    const [first, last, most] = [at("first").value, at("last").value, at("first").max];
    at("layers").textContent = first === last ? first : `${first} to ${last}`;
    const part = { both: "keys and values", keys: "keys", values: "values" }[choice.part ?? "both"];
    const band = +first === 0 && last === most ? "all layers" : `layers ${at("layers").textContent}`;
    at("chosen").textContent = `${places.size} token${places.size === 1 ? "" : "s"}, ${part}, ${band}`;
  }

  function move(place) {
    options()[active]?.classList.remove("active");
    active = Math.max(0, Math.min(prompt.end - 1, place));
    const token = options()[active];
    token.classList.add("active");
    box.firstElementChild.setAttribute("aria-activedescendant", token.id);
  }

  const stretch = (from, to) => Array.from({ length: Math.abs(to - from) + 1 }, (_, step) => Math.min(from, to) + step).filter(open_);

  function chooseTokens(places) {
    select(new Set(places));
    return choose({ positions: [...chosen].sort((one, other) => one - other) });
  }

  function toggled(place) {
    const places = new Set(chosen);
    if (!places.delete(place)) places.add(place);
    return places;
  }

  // The token nearest to the active one in the line of text above or below it.
  function inLine(direction) {
    const boxes = [...options()].slice(0, prompt.end).map((token) => token.getClientRects()[0] ?? token.getBoundingClientRect());
    const { top, left } = boxes[active];
    const further = boxes.map((each, place) => ({ place, ...each.toJSON() })).filter((each) => direction * (each.top - top) > 4);
    if (!further.length) return active;
    const line = further.reduce((nearest, each) => (direction * (each.top - nearest.top) < 0 ? each : nearest)).top;
    const same = further.filter((each) => Math.abs(each.top - line) <= 4);
    return same.reduce((nearest, each) => (Math.abs(each.left - left) < Math.abs(nearest.left - left) ? each : nearest)).place;
  }

  box.addEventListener("keydown", (event) => {
    const steps = {
      ArrowLeft: () => active - 1, ArrowRight: () => active + 1, Home: () => 0, End: () => prompt.end - 1,
      ArrowUp: () => inLine(-1), ArrowDown: () => inLine(1),
    };
    if (event.key in steps) {
      const from = anchor;
      move(steps[event.key]());
      options()[active].scrollIntoView({ block: "nearest" });
      if (event.shiftKey) chooseTokens(stretch(from, active)); else anchor = active;
    } else if (event.key === " ") {
      anchor = active;
      chooseTokens(toggled(active));
    } else if (event.key === "Escape") chooseTokens([]);
    else if (event.key === "a" && (event.ctrlKey || event.metaKey)) chooseTokens(stretch(0, prompt.end - 1));
    else return;
    event.preventDefault();
  });

  const under = (event) => [...options()].indexOf(document.elementFromPoint(event.clientX, event.clientY)?.closest(".token"));

  box.addEventListener("pointerdown", (event) => {
    const place = under(event);
    if (place < 0 || !open_(place) || event.button) return;
    if (event.shiftKey) {
      move(place);
      chooseTokens(stretch(anchor, place));
      return;
    }
    anchor = place;
    move(place);
    dragged = { before: new Set(chosen), adds: !chosen.has(place), to: place };
    select(toggled(place));
  });
  document.addEventListener("pointermove", (event) => {
    const place = dragged ? under(event) : -1;
    if (place < 0 || !open_(place) || place === dragged.to) return;
    dragged.to = place;
    const places = new Set(dragged.before);
    for (const each of stretch(anchor, place)) dragged.adds ? places.add(each) : places.delete(each);
    move(place);
    chooseTokens(places);
  });
  document.addEventListener("pointerup", () => {
    if (dragged) chooseTokens(chosen);
    dragged = null;
  });
  // A finger that scrolls the page was no choice.
  document.addEventListener("pointercancel", () => {
    if (dragged) chooseTokens(dragged.before);
    dragged = null;
  });

  // ---- controls

  document.querySelector("[aria-label='Choose tokens']").addEventListener("click", ({ target }) => {
    const [start, end] = prompt?.span ?? [0, 0];
    const sets = { field: () => stretch(start, end - 1), after: () => stretch(end, prompt.end - 1), strongest: () => strongest.slice(0, 8), none: () => [] };
    if (prompt && target.dataset.choose) chooseTokens(sets[target.dataset.choose]());
  });
  for (const radio of document.getElementsByName("part")) radio.addEventListener("change", () => choose({ part: radio.value }));
  for (const id of ["first", "last"]) at(id).addEventListener("input", () => {
    const other = at(id === "first" ? "last" : "first");
    if (+at("first").value > +at("last").value) other.value = at(id).value;
    choose({ layers: [+at("first").value, +at("last").value] });
  });
  methods.addEventListener("change", () => choose({ method: methods.value }));
  at("field").addEventListener("change", () => choose({ field: at("field").value, positions: null }));
  at("value").addEventListener("change", () => show({ value: at("value").value }));
  at("prompt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (document.activeElement === at("value")) at("value").blur();
    else show({ file: at("prompt").value, choice: { ...choice, field: "", positions: null, layers: null } });
  });
  at("open").addEventListener("change", async () => {
    const [given] = at("open").files;
    if (given) await open(await given.text());
    at("open").value = "";
  });

  // ---- the state beside

  function putBeside(state) {
    keptShown = JSON.stringify(state);
    const copy = now.cloneNode(true);
    for (const control of copy.querySelectorAll(".controls, .quiet")) control.remove();
    for (const method of copy.querySelectorAll("select")) method.replaceWith(methods.value);
    copy.querySelector("h2").textContent = `Kept: ${prompt.field} → ${prompt.fields.find(({ name }) => name === prompt.field).new}`;
    for (const each of copy.querySelectorAll("[id]")) each.removeAttribute("id");
    copy.querySelector("h2").id = "kept-title";
    for (const token of copy.querySelectorAll("[role='listbox'], [role='option']")) for (const name of token.getAttributeNames()) if (/^(role|tabindex|aria)/.test(name)) token.removeAttribute(name);
    kept.replaceChildren(...copy.childNodes);
    kept.hidden = at("drop").hidden = false;
  }

  at("keep").addEventListener("click", () => {
    const state = JSON.parse(file);
    delete state.explore.kept;
    putBeside(state);
    choose({ kept: state });
  });
  at("drop").addEventListener("click", () => {
    kept.hidden = at("drop").hidden = true;
    keptShown = "";
    choose({ kept: null });
  });

  function linked() {
    const link = location.hash.slice(1).replaceAll("-", "+").replaceAll("_", "/");
    if (!link) return null;
    try {
      return new TextDecoder().decode(Uint8Array.from(atob(link), (letter) => letter.charCodeAt(0)));
    } catch {
      return null;
    }
  }
  addEventListener("hashchange", () => { const state = linked(); if (state) open(state); });
  open(linked() ?? file);
})();
