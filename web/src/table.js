/** A table that is shown as cards on a narrow screen, and stays a table for screen readers. */

import { html } from "./html.js";

/**
 * @typedef {object} Column
 * @property {string} key
 * @property {any} label
 * @property {(row: any) => any} cell the content
 * @property {boolean} [numeric] right-aligned
 * @property {string} [hint] tooltip
 * @property {boolean} [head] names the row
 * @property {boolean} [sortable]
 * @property {boolean} [wide] takes the whole width on a phone
 */

/**
 * @param {object} props
 * @param {string} props.caption for screen readers
 * @param {Column[]} props.columns
 * @param {any[]} props.rows
 * @param {(row: any) => string} props.rowKey
 * @param {(row: any) => string} [props.rowClass]
 * @param {{key: string, down: boolean}} [props.sort]
 * @param {(key: string) => void} [props.onSort]
 */
export function Table({ caption, columns, rows, rowKey, rowClass, sort, onSort }) {
  return html`
    <table class="table" role="table" aria-label=${caption}>
      <thead role="rowgroup">
        <tr role="row">
          ${columns.map((column) => html`<${Head} key=${column.key} ...${{ column, sort, onSort }} />`)}
        </tr>
      </thead>
      <tbody role="rowgroup">
        ${rows.map(
          (row) => html`<tr key=${rowKey(row)} role="row" class=${rowClass?.(row)}>
            ${columns.map((column) => html`<${Cell} key=${column.key} ...${{ column, row }} />`)}
          </tr>`,
        )}
      </tbody>
    </table>
  `;
}

function Head({ column, sort, onSort }) {
  const sorted = sort?.key === column.key;
  const direction = sorted ? (sort.down ? "descending" : "ascending") : undefined;
  return html`
    <th role="columnheader" scope="col" class=${kind(column)} title=${column.hint} aria-sort=${direction}>
      ${
        column.sortable && onSort
          ? html`<button type="button" class="sort" onClick=${() => onSort(column.key)}>
              ${column.label}<span aria-hidden="true" class="arrow">${sorted ? (sort.down ? "↓" : "↑") : ""}</span>
            </button>`
          : column.label
      }
    </th>
  `;
}

function Cell({ column, row }) {
  if (column.head) {
    return html`<th role="rowheader" scope="row" class="head">${column.cell(row)}</th>`;
  }
  return html`<td role="cell" class=${kind(column)} data-label=${typeof column.label === "string" ? column.label : undefined}>${column.cell(row)}</td>`;
}

const kind = (column) => [column.numeric && "numeric", column.wide && "wide", column.head && "head"].filter(Boolean).join(" ") || undefined;
