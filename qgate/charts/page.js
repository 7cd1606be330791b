'use strict';
(() => {
const value = text => {
  const t = text.replace('\u2212', '-').replace(/^[<>=\u2264\u2265\s]+/, '');
  return t === 'inf' ? Infinity : t === '-inf' ? -Infinity : Number.parseFloat(t);
};
const key = (row, column) => {
  const cell = row.cells[column];
  return !cell ? '' : cell.dataset.key === undefined ? cell.textContent : cell.dataset.key;
};
const rowsOf = table => table.tBodies.length ? [...table.tBodies[0].rows] : [];
// Of a long table the page has the first rows, and the text of the others, where browsers without
// scripts read them: they are appended when the page is idle, or all when somebody asks for them.
const later = new Map();
for (const rest of document.querySelectorAll('.scroll > table + noscript')) {
  const [, text] = rest.textContent.split('<tbody>');
  later.set(rest.previousElementSibling,
    text.slice(0, text.lastIndexOf('</tbody>')).split('<tr').slice(1));
}
function read(table, count) {
  const rest = later.get(table);
  if (!rest) return;
  const html = rest.splice(0, count).map(row => `<tr${row}`).join('');
  table.tBodies[0].insertAdjacentHTML('beforeend', html);
  if (!rest.length) later.delete(table);
}
const idle = self.requestIdleCallback || (task => setTimeout(task, 50));
function readOn() {
  const [table] = later.keys();
  if (!table) return;
  read(table, 500);
  idle(readOn);
}
const original = new Map();
function rowsInOrder(table) {
  if (!original.has(table)) {
    read(table, Infinity);
    original.set(table, rowsOf(table));
  }
  return original.get(table);
}
// To lay out ten thousand rows takes seconds: the first are there at once, the others follow.
const coming = new Map();
function follow(table, count) {
  const rows = coming.get(table);
  if (!rows) return;
  clearTimeout(rows.timer);
  table.tBodies[0].append(...rows.splice(0, count));
  if (rows.length) rows.timer = setTimeout(follow, 30, table, count);
  else coming.delete(table);
}
function followAll() {
  [...later.keys()].forEach(table => read(table, Infinity));
  [...coming.keys()].forEach(table => follow(table, Infinity));
}
function reorder(table, rows) {
  const waiting = coming.get(table);
  if (waiting) clearTimeout(waiting.timer);
  let cut = rows.length > 2000 ? 0 : rows.length;
  for (let seen = 0; seen < 500 && cut < rows.length; cut += 1) seen += !rows[cut].hidden;
  const body = table.tBodies[0], after = body.nextSibling;
  body.remove();
  body.replaceChildren(...rows.slice(0, cut));
  table.insertBefore(body, after);
  const rest = rows.slice(cut);
  coming.delete(table);
  if (!rest.length) return;
  coming.set(table, rest);
  rest.timer = setTimeout(follow, 300, table, 700);
}
function sortBy(table, column, down) {
  const heads = [...table.tHead.rows[0].cells], head = heads[column];
  if (!head) return;
  heads.forEach(other => other.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const number = head.classList.contains('number');
  const order = new Intl.Collator(undefined, { numeric: true }).compare;
  const keyed = rowsInOrder(table).map(row => {
    const text = key(row, column);
    return [number ? value(text) : text, row];
  });
  keyed.sort(([x], [y]) => {
    if (!number) return down ? order(y, x) : order(x, y);
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return down ? (y > x) - (y < x) : (x > y) - (x < y);
  });
  reorder(table, keyed.map(([, row]) => row));
}
for (const table of document.querySelectorAll('table.sortable')) {
  if (!table.tHead || !table.tBodies.length) continue;
  table.tHead.addEventListener('click', event => {
    const button = event.target.closest('button'), head = button && button.closest('th');
    if (!head) return;
    sortBy(table, head.cellIndex, head.getAttribute('aria-sort') !== 'descending');
    table.dispatchEvent(new Event('sorted'));
  });
}

// The state of a table is in the address: `#show&mode=2-1&sort=margin`; of a table that is not
// that of all gates with its name, `#show&table=compared&…`.
const forms = [...document.querySelectorAll('form.filters')];
for (const form of forms) {
  const list = document.getElementById(form.dataset.table);
  if (!list || !list.tHead) continue;
  const own = list.id === 'all-gates' ? '' : list.id;
  form.hidden = false;
  const fields = [...form.elements].filter(each => each.name);
  const count = form.querySelector('output');
  const heads = [...list.tHead.rows[0].cells];
  const names = heads.map(head => head.textContent.trim());
  const all = () => rowsInOrder(list);
  const texts = new Map();
  const text = row => {
    if (!texts.has(row)) {
      const [start, ...more] = (row.dataset.search || '').split('|');
      texts.set(row, [...row.cells].map(c => c.textContent)
        .concat(row.title, more.map(each => start + each)).join(' ').toLowerCase());
    }
    return texts.get(row);
  };
  const shown = () => {
    const rows = original.get(list) || rowsOf(list), unread = (later.get(list) || []).length;
    const left = rows.reduce((sum, row) => sum + !row.hidden, unread);
    const total = rows.length + unread;
    const said = `${left.toLocaleString('en')} of ${total.toLocaleString('en')} shown`;
    if (count.textContent !== said) count.textContent = said;
  };
  const apply = () => {
    const wanted = fields.filter(field => field.value.trim());
    const words = wanted.filter(f => f.dataset.column === undefined)
      .flatMap(f => f.value.toLowerCase().trim().split(/\s+/));
    const exact = wanted.filter(f => f.dataset.column !== undefined)
      .map(f => [Number(f.dataset.column), f.value]);
    for (const row of all()) {
      const hide = exact.some(([column, value]) => row.cells[column].textContent !== value)
        || (words.length > 0 && !words.every(word => text(row).includes(word)));
      if (row.hidden !== hide) row.hidden = hide;
    }
    shown();
  };
  const save = () => {
    const state = new URLSearchParams(own && { table: own });
    fields.forEach(field => field.value.trim() && state.set(field.name, field.value.trim()));
    const head = heads.find(each => each.hasAttribute('aria-sort'));
    if (head) {
      state.set('sort', names[head.cellIndex]);
      if (head.getAttribute('aria-sort') === 'ascending') state.set('order', 'up');
    }
    const start = `#${form.closest('section').id}`, query = state.toString();
    const address = state.size > (own ? 1 : 0) ? `#show&${query}` : start;
    const here = form.querySelector('a.here');
    if (here) here.href = address;
    try {
      history.replaceState(null, '', address);
    } catch { /* a sandbox that keeps its address */ }
  };
  const reset = () => {
    fields.forEach(field => { field.value = ''; });
    heads.forEach(head => head.removeAttribute('aria-sort'));
    reorder(list, all());
    apply();
  };
  const load = () => {
    const hash = location.hash.slice(1);
    if (!hash.startsWith('show')) return;
    const state = new URLSearchParams(hash.slice(5));
    if ((state.get('table') || '') !== own) return;
    fields.forEach(field => {
      field.value = state.get(field.name) || '';
      if (field.selectedIndex === -1) field.value = '';
    });
    const column = names.indexOf(state.get('sort'));
    if (column >= 0) sortBy(list, column, state.get('order') !== 'up');
    apply();
    const here = form.querySelector('a.here');
    if (here) here.href = `#${hash}`;
    form.closest('section').scrollIntoView();
  };
  let waiting = 0;
  form.addEventListener('input', () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { apply(); save(); }, all().length > 3000 ? 200 : 60);
  });
  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('reset', event => { event.preventDefault(); reset(); save(); });
  list.addEventListener('sorted', save);
  list.addEventListener('unhidden', shown);
  addEventListener('hashchange', load);
  shown();
  load();
}

function jump() {
  const hash = location.hash.slice(1);
  if (!hash || hash.startsWith('show')) return;
  let name = '';
  try { name = decodeURIComponent(hash); } catch { return; }
  let target = document.getElementById(name);
  if (!target) {
    followAll();
    target = document.getElementById(name);
    if (!target) return;
    location.replace(location.hash); // for :target
  }
  if (target.hidden && target.matches('tr')) {
    target.hidden = false;
    target.closest('table').dispatchEvent(new Event('unhidden'));
  }
  for (let at = target; at; at = at.parentElement) if (at.matches('details')) at.open = true;
  for (const each of target.querySelectorAll(':scope > details.folded')) each.open = true;
  const details = document.getElementById(target.id.replace(/^gate-/, 'details-'));
  if (details && details.matches('details')) details.open = true;
  if (target.matches('tr, details, section')) {
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
  }
  target.scrollIntoView({ block: target.matches('tr') ? 'center' : 'start' });
}
addEventListener('hashchange', jump);
document.addEventListener('click', event => {
  const link = event.target.closest && event.target.closest('a[href^="#"]');
  if (link && !event.defaultPrevented && link.hash === location.hash) jump();
});
if (location.hash) jump();

for (const heat of document.querySelectorAll('table.heat')) {
  const links = [...heat.querySelectorAll('td a')];
  links.forEach(link => { link.tabIndex = -1; });
  const start = heat.querySelector('td.bad a') || links[0];
  if (start) start.tabIndex = 0;
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  heat.addEventListener('keydown', event => {
    const step = steps[event.key], cell = event.target.closest('td');
    if (!step || !cell || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    let row = cell.parentElement.rowIndex, column = cell.cellIndex;
    for (;;) {
      row += step[0];
      column += step[1];
      const next = heat.rows[row] && heat.rows[row].cells[column];
      if (!next) return;
      const link = next.querySelector('a');
      if (!link) continue;
      links.forEach(each => { each.tabIndex = -1; });
      link.tabIndex = 0;
      link.focus();
      return;
    }
  });
}

// Tabs: the links to sections show one of them at a time; the address says which.
for (const nav of document.querySelectorAll('nav.tabs')) {
  const tabs = [...nav.querySelectorAll('a')];
  const panel = tab => document.getElementById(tab.hash.slice(1));
  const show = (chosen, focus) => {
    for (const tab of tabs) {
      const on = tab === chosen;
      tab.setAttribute('aria-selected', on);
      tab.tabIndex = on ? 0 : -1;
      panel(tab).classList.toggle('behind', !on);
    }
    if (focus) chosen.focus();
  };
  nav.setAttribute('role', 'tablist');
  for (const tab of tabs) {
    tab.id = `tab-${tab.hash.slice(1)}`;
    tab.setAttribute('role', 'tab');
    tab.setAttribute('aria-controls', tab.hash.slice(1));
    panel(tab).setAttribute('role', 'tabpanel');
    panel(tab).setAttribute('aria-labelledby', tab.id);
  }
  const follow = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    show(tabs.find(tab => target && panel(tab).contains(target)) || tabs[0]);
  };
  nav.addEventListener('click', event => {
    const tab = event.target.closest('a');
    if (!tab) return;
    event.preventDefault();
    show(tab, true);
    try {
      history.replaceState(null, '', tab.hash);
    } catch { /* a sandbox that keeps its address */ }
  });
  nav.addEventListener('keydown', event => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const at = tabs.indexOf(document.activeElement);
    tabs[Math.min(Math.max(at + step, 0), tabs.length - 1)].click();
  });
  addEventListener('hashchange', follow);
  follow();
}

for (const button of document.querySelectorAll('button.unfold')) {
  const all = [...button.closest('section').querySelectorAll('details')];
  const tell = () => {
    button.textContent = all.every(each => each.open) ? 'Close all' : 'Open all';
  };
  button.hidden = false;
  button.addEventListener('click', () => {
    const open = !all.every(each => each.open);
    all.forEach(each => { each.open = open; });
    tell();
  });
  all.forEach(each => each.addEventListener('toggle', tell));
  tell();
}

const opened = [];
addEventListener('beforeprint', () => {
  followAll();
  for (const each of document.querySelectorAll('details:not([open], .cases)')) {
    each.open = true;
    opened.push(each);
  }
});
addEventListener('load', () => idle(readOn));
addEventListener('afterprint', () => { opened.splice(0).forEach(each => { each.open = false; }); });
})();
