/** The head of all views of a queue: its name, its state, and tabs. */

import { getQueue } from "../api.js";
import { Shown, sizeOf, sumOf } from "../figure.js";
import { html } from "../html.js";
import { ServerState, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { groupsAddress, queueAddress, redrivesAddress, storedJobsAddress } from "../routing.js";
import { useMe } from "../session.js";
import { StateBadge } from "../queue_state.js";

/** @import { Figure } from "../api_types" */

/** One queue, polled. */
export function useQueue(connection, queue) {
  const me = useMe();
  return usePoll((signal) => getQueue(connection, queue, signal), me.refresh_seconds, `${connection}/${queue}`);
}

/**
 * @param {object} props
 * @param {string} props.connection
 * @param {string} props.queue
 * @param {ReturnType<typeof useQueue>} props.poll
 * @param {"overview" | "dead" | "parked" | "jobs" | "redrives" | "search"} props.tab the current one
 */
export function QueueHead({ connection, queue, poll, tab }) {
  const numbers = poll.data?.numbers;
  /** @type {[string, string, string, Figure | null | undefined][]} */
  const tabs = [
    ["overview", "Overview", queueAddress(connection, queue), null],
    ["dead", "Dead letters", groupsAddress(connection, queue), numbers?.dead],
    ["parked", "Parked", groupsAddress(connection, queue, { parked: "true" }), numbers?.parked],
    ["redrives", "Redrives", redrivesAddress(connection, queue), null],
    ["jobs", "Jobs", storedJobsAddress(connection, queue), numbers && sumOf([numbers.pending, numbers.in_flight])],
  ];
  return html`
    <div class="queue-head">
      <h1 class="title">${queue} <span class="aside">${connection}</span></h1>
      ${numbers && html`<${StateBadge} numbers=${numbers} />`}
    </div>
    <nav class="tabs" aria-label="Parts of the queue">
      ${tabs.map(
        ([name, label, to, amount]) => html`<a key=${name} href=${to} aria-current=${name === tab ? "page" : undefined}>
          ${label}${amount?.value != null && html` <span class="pill ${sizeOf(amount) && name === "dead" ? "bad" : ""}"><${Shown} of=${amount} dated=${false} /></span>`}
        </a>`,
      )}
    </nav>
    <${PollError} poll=${poll} />
    ${
      poll.data &&
      html`<${ServerState} connection=${connection} state=${poll.data.state} problem=${poll.data.problem}
        age=${poll.data.age_seconds} />`
    }
  `;
}
