// Tables that sort by a click on a heading and filter by typing.

// columns: [{name, run, group, numeric}]; rows: [{run, cells: [{text, value, title, kind, notes}]}].
// value: what to sort by; run: the run that a row or column belongs to, hidden together with it.
class SortedTable {
  constructor({ caption, columns, rows, filter, keep }) {
    this.columns = columns;
    this.rows = rows.map((row) => ({ ...row, element: this.makeRow(row) }));
    this.keep = keep || (() => true);
    this.order = { column: -1, falling: false };
    this.body = make("tbody", {}, ...this.rows.map((row) => row.element));
    this.heads = columns.map((column, i) => this.makeHead(column, i));
    const groups = columns.some((column) => column.group) ? [this.makeGroups()] : [];
    this.count = make("span", { class: "soft", role: "status" });
    this.filter = filter ? make("input", {
      type: "search", placeholder: filter, "aria-label": filter, oninput: () => this.show(),
    }) : null;
    this.element = make("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": caption },
      make("table", { class: "data" },
        make("caption", { class: "hidden", text: caption }),
        make("thead", {}, ...groups, make("tr", {}, ...this.heads)),
        this.body));
    this.show();
  }

  makeGroups() {
    const cells = [];
    for (const { group = "" } of this.columns) {
      const last = cells[cells.length - 1];
      if (last && last.textContent === group) last.colSpan += 1;
      else cells.push(make(group ? "th" : "td", { class: "group", scope: group ? "colgroup" : null, text: group }));
    }
    return make("tr", {}, ...cells);
  }

  makeHead(column, i) {
    const mark = column.run === undefined ? null : swatch(column.run);
    const button = make("button", { type: "button", onclick: () => this.sortBy(i) },
      mark, make("span", { text: column.name }));
    return make("th", {
      scope: "col", class: column.numeric ? "number" : null, "aria-sort": "none", "data-run": column.run,
    }, button);
  }

  makeRow({ run, cells }) {
    const elements = cells.map((cell, i) => {
      const column = this.columns[i];
      const notes = (cell.notes || []).map((note) => make("small", { class: note.kind, text: note.text }));
      const kind = [cell.kind, column.numeric ? "number" : null].filter(Boolean).join(" ");
      return make(i === 0 ? "th" : "td", {
        class: kind || null, scope: i === 0 ? "row" : null, title: cell.title, "data-run": column.run,
      }, i === 0 && run !== undefined ? swatch(run) : null,
      make("span", { class: "cell", text: cell.text }), ...notes);
    });
    return make("tr", { "data-run": run }, ...elements);
  }

  sortBy(column) {
    const { order } = this;
    const again = order.column === column;
    this.order = { column, falling: again ? !order.falling : false };
    const sign = this.order.falling ? -1 : 1;
    this.rows.sort((a, b) => compareValues(a.cells[column], b.cells[column], sign));
    this.body.append(...this.rows.map((row) => row.element));
    this.heads.forEach((head, i) => head.setAttribute(
      "aria-sort", i !== column ? "none" : this.order.falling ? "descending" : "ascending"));
  }

  // Hide what the filter, the caller or the choice of runs leaves out.
  show() {
    const wanted = this.filter ? this.filter.value.trim().toLowerCase().split(/\s+/) : [];
    let count = 0;
    for (const row of this.rows) {
      const text = row.cells.map((cell) => cell.text).join(" ").toLowerCase();
      const kept = this.keep(row) && wanted.every((word) => text.includes(word));
      row.element.hidden = !kept || (row.run !== undefined && !state.shown[row.run]);
      count += kept ? 1 : 0;
    }
    this.count.textContent = `${count} of ${this.rows.length}`;
  }
}

// Numbers before texts, both in order; what is missing is last in either direction.
function compareValues(a, b, sign) {
  const [x, y] = [a, b].map((cell) => cell.value === undefined ? cell.text : cell.value);
  const missing = (value) => value === null || value === ABSENT || Number.isNaN(value);
  if (missing(x) || missing(y)) return missing(x) - missing(y);
  const bothNumbers = isNumeric(x) && isNumeric(y);
  if (bothNumbers) return sign * (Number(x) - Number(y));
  if (isNumeric(x) !== isNumeric(y)) return isNumeric(x) ? -sign : sign;
  return sign * String(x).localeCompare(String(y), "en", { numeric: true });
}

function isNumeric(value) {
  return value !== "" && !Number.isNaN(Number(value));
}
