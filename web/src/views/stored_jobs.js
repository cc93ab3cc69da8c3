/** Jobs that are no dead letters: pending ones, those in flight, and those that no consumer takes. */

import { getStoredJob, getStoredJobs } from "../api.js";
import { bytes, clock, counted, exact } from "../format.js";
import { html } from "../html.js";
import { Ago, Badge, Empty, Facts, Loading, Notice, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { go, storedJobAddress, storedJobsAddress, withChanges } from "../routing.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";
import { AttemptList, LastAttempt } from "./attempts.js";
import { Headers } from "./headers.js";
import { JobName, Origin, jobName } from "./origin.js";
import { Payload } from "./payload.js";
import { RetryButtons } from "./retry.js";
import { QueueHead, useQueue } from "./queue_head.js";

const PAGE = 50;
/** @type {Record<string, [string, string]>} */
const STATES = {
  pending: ["Pending", "Never delivered"],
  delivered: ["In flight", "Delivered and still stored: in flight, waiting for the next delivery, or dead"],
  unserved: ["Unserved", "Match no consumer's filter"],
};

/** The jobs in one state, a page of them. */
export function StoredJobsView({ connection, queue, query }) {
  const me = useMe();
  const head = useQueue(connection, queue);
  const state = query.get("state") ?? "pending";
  const parameters = withChanges(new URLSearchParams(), {
    state,
    consumer: query.get("consumer"),
    after: query.get("after"),
    limit: PAGE,
  });
  const poll = usePoll(
    (signal) => getStoredJobs(connection, queue, parameters, signal),
    Math.max(2, me.refresh_seconds),
    `${connection}/${queue}/jobs?${parameters}`,
  );
  const page = poll.data;
  const to = (changes) => storedJobsAddress(connection, queue, withChanges(query, changes));
  const columns = [
    {
      key: "job", label: "Job", head: true,
      cell: (job) => html`<${JobName} letter=${job} to=${storedJobAddress(connection, queue, job.sequence, query)} />`,
    },
    { key: "subject", label: "Subject", wide: true, cell: (job) => html`<code class="long" title=${job.subject}>${job.subject}</code>` },
    { key: "consumer", label: "Consumer", cell: (job) => job.consumer ?? html`<span class="aside">none</span>` },
    { key: "origin", label: "Published by", cell: (job) => html`<span class="long"><${Origin} origin=${job.origin} /></span>` },
    { key: "size", label: "Size", numeric: true, cell: (job) => bytes(job.size) },
    { key: "redrives", label: "Redriven", numeric: true, cell: (job) => exact(job.redrives) },
    ...(state === "delivered"
      ? [{ key: "attempt", label: "Last attempt", wide: true, cell: (job) => html`<${LastAttempt} attempt=${job.attempt} />` },
         { key: "retry", label: "Waits", cell: (job) => html`<${RetryButtons} ...${{ connection, queue }} sequence=${job.sequence} name=${jobName(job)} attempt=${job.attempt} reload=${poll.reload} />` }]
      : []),
    { key: "stored", label: "Stored", cell: (job) => html`<${Ago} time=${job.stored_at} />` },
  ];
  return html`
    <${QueueHead} ...${{ connection, queue }} poll=${head} tab="jobs" />
    <div class="toolbar" role="group" aria-label="State">
      ${Object.entries(STATES).map(
        ([name, [label, meaning]]) => html`<button key=${name} type="button" title=${meaning} aria-pressed=${state === name}
          onClick=${() => go(to({ state: name, after: null }))}>${label}</button>`,
      )}
      ${
        (head.data?.consumers.length ?? 0) > 1 &&
        html`<select aria-label="Consumer" onChange=${(event) => go(to({ consumer: event.currentTarget.value, after: null }))}>
          <option value="">all consumers</option>
          ${head.data?.consumers.map((item) => html`<option key=${item.name} value=${item.name} selected=${query.get("consumer") === item.name}>${item.name}</option>`)}
        </select>`
      }
      ${page && html`<span class="hint" role="status">${counted(page.total, "job")}</span>`}
    </div>
    <${PollError} poll=${poll} />
    ${!page && !poll.error && html`<${Loading} what="the jobs" rows=${6} />`}
    ${
      page &&
      (page.jobs.length
        ? html`<div class="panel letters"><${Table} caption="Jobs" columns=${columns} rows=${page.jobs} rowKey=${(job) => job.sequence} /></div>`
        : html`<${Empty} title="No job in this state">${STATES[state]?.[1] ?? ""}: none at present.<//>`)
    }
    ${page && page.not_shown > 0 && html`<p class="hint">${counted(page.not_shown, "job")} of DAGs that you may not see aren't shown.</p>`}
    ${
      page &&
      html`<nav class="pages" aria-label="Pages">
        <button type="button" disabled=${!query.get("after")} onClick=${() => go(to({ after: null }))}>First</button>
        <button type="button" disabled=${page.next_after == null} onClick=${() => go(to({ after: page.next_after }))}>Next</button>
      </nav>`
    }
  `;
}

/** One stored job. */
export function StoredJobView({ connection, queue, sequence }) {
  const me = useMe();
  const poll = usePoll((signal) => getStoredJob(connection, queue, sequence, signal), Math.max(5, me.refresh_seconds), `${connection}/${queue}/job/${sequence}`);
  const detail = poll.data;
  if (poll.error?.status === 404) {
    return html`<${Notice} title=${`Job ${sequence} isn't stored`}>It has ended, or was never in this queue.<//>`;
  }
  return html`
    <${PollError} poll=${poll} />
    ${!detail && !poll.error && html`<${Loading} what="the job" rows=${6} />`}
    ${
      detail &&
      html`
        <div class="queue-head">
          <h1 class="title">${jobName(detail.job)} <span class="aside">of ${queue}</span></h1>
          <${Badge} title=${STATES[detail.job.state]?.[1]}>${STATES[detail.job.state]?.[0] ?? detail.job.state}<//>
        </div>
        <div class="letter">
          <div class="main">
            <section><h2>Payload</h2><${Payload} payload=${detail.payload} /></section>
            ${!detail.hidden && html`<section><h2>Headers</h2><${Headers} headers=${detail.headers} /></section>`}
          </div>
          <div class="side">
            <section>
              <h2>Facts</h2>
              <div class="panel padded">
                <${Facts}
                  pairs=${[
                    ["Published by", html`<${Origin} origin=${detail.job.origin} full=${true} />`],
                    ["Job id", detail.job.job_id === String(detail.job.sequence) ? "none" : html`<code>${detail.job.job_id}</code>`],
                    ["Stream sequence", html`<code>${detail.job.sequence}</code>`],
                    ["Subject", html`<code>${detail.job.subject}</code>`],
                    ["Consumer", detail.job.consumer],
                    ["Stored", html`${clock(detail.job.stored_at)}, <${Ago} time=${detail.job.stored_at} />`],
                    ["Redriven before", detail.job.redrives ? exact(detail.job.redrives) : "never"],
                  ]}
                />
              </div>
            </section>
            ${
              detail.attempts.length > 0 &&
              html`<section>
                <h2>Attempts</h2>
                <${AttemptList} attempts=${detail.attempts} />
                <${RetryButtons} ...${{ connection, queue, sequence }} name=${jobName(detail.job)} attempt=${detail.attempts.at(-1) ?? null} reload=${poll.reload} />
              </section>`
            }
          </div>
        </div>
      `
    }
  `;
}
