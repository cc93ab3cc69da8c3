/** The frame around the views: breadcrumb, live button, started DAG runs. */

import { getMe } from "./api.js";
import { Confirmation } from "./confirmation.js";
import { EditMany } from "./edit_many.js";
import { Component, html, useEffect, useRef } from "./html.js";
import { Failure, Loading, Notice } from "./components.js";
import { setLive, useLive, usePoll } from "./polling.js";
import {
  groupsAddress,
  jobsAddress,
  lettersAddress,
  queueAddress,
  queuesAddress,
  redrivesAddress,
  storedJobsAddress,
  useRoute,
} from "./routing.js";
import { isEmbedded } from "./place.js";
import { Runs } from "./runs.js";
import { Session } from "./session.js";
import { CardView } from "./views/card.js";
import { DagView } from "./views/dag.js";
import { GroupsView } from "./views/groups.js";
import { JobsView } from "./views/jobs.js";
import { LetterView } from "./views/letter.js";
import { LettersView } from "./views/letters.js";
import { StoredJobView, StoredJobsView } from "./views/stored_jobs.js";
import { RedriveView, RedrivesView } from "./views/redrives.js";
import { QueueView } from "./views/queue.js";
import { QueuesView } from "./views/queues.js";

const VIEWS = {
  card: CardView,
  queues: QueuesView,
  queue: QueueView,
  dead: GroupsView,
  letters: LettersView,
  letter: LetterView,
  stored: StoredJobsView,
  job: StoredJobView,
  redrives: RedrivesView,
  redrive: RedriveView,
  jobs: JobsView,
  dag: DagView,
};
const ME_SECONDS = 60;

/** The whole page. */
export function App() {
  const route = useRoute();
  const me = usePoll(getMe, ME_SECONDS, "me");
  const main = useRef(/** @type {HTMLElement | null} */ (null));
  const firstRender = useRef(true);
  const address = JSON.stringify([route.view, route.connection, route.queue, route.sequence, route.id]);
  useEffect(() => {
    if (!isEmbedded()) document.title = titleOf(route);
    // Screen readers and keyboards start at the new content.
    if (!firstRender.current) {
      main.current?.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    firstRender.current = false;
  }, [address]);
  const View = VIEWS[route.view];
  const card = route.view === "card";
  return html`
    ${
      !card &&
      // Its surroundings are Airflow's.
      !isEmbedded() &&
      html`<header class="top">
        <${Breadcrumb} route=${route} />
        <${Live} />
      </header>`
    }
    <main ref=${main} tabindex="-1" class=${card ? "card" : ""}>
      <${ErrorBoundary} key=${address}>
        ${!me.data && me.error && html`<${Failure} error=${me.error} reload=${me.reload} />`}
        ${!me.data && !me.error && html`<${Loading} what="the page" rows=${6} />`}
        ${
          me.data &&
          html`<${Session.Provider} value=${me.data}>
            ${me.error?.status === 401 && html`<${Failure} error=${me.error} />`}
            ${!card && html`<${Runs} />`}
            <${View} ...${route} />
            <${Confirmation} />
            <${EditMany} />
          <//>`
        }
      <//>
    </main>
  `;
}

const TITLES = { dead: "Dead letters", letters: "Letters", stored: "Jobs", redrives: "Redrives", redrive: "Redrive" };

/** @param {import("./routing.js").Route} route */
const titleOf = ({ view, queue, sequence }) =>
  [view === "letter" && `Letter ${sequence}`, view === "job" && `Job ${sequence}`, TITLES[view], queue, "JetStream"].filter(Boolean).join(" · ");

/** The path to the current view, with links. */
function Breadcrumb({ route }) {
  const { view, connection, queue, sequence, id, query } = route;
  const steps = [["JetStream", queuesAddress()]];
  if (view === "dag") steps.push(["DAG", window.location.hash]);
  if (view === "jobs") steps.push(["Jobs", jobsAddress(query)]);
  if (queue) steps.push([queue, queueAddress(connection, queue)]);
  const parked = query.get("parked") === "true" ? { parked: "true" } : {};
  if (view === "dead" || view === "letters" || view === "letter") {
    steps.push([parked.parked ? "Parked" : "Dead letters", groupsAddress(connection, queue, parked)]);
  }
  if (view === "letters" || view === "letter") steps.push(["Letters", lettersAddress(connection, queue, query)]);
  if (view === "stored" || view === "job") steps.push(["Jobs", storedJobsAddress(connection, queue, query)]);
  if (view === "job") steps.push([`Job ${sequence}`, window.location.hash]);
  if (view === "redrives" || view === "redrive") steps.push(["Redrives", redrivesAddress(connection, queue)]);
  if (view === "redrive") steps.push([id, window.location.hash]);
  if (view === "letter") steps.push([`Letter ${sequence}`, window.location.hash]);
  return html`
    <nav class="trail" aria-label="Breadcrumb">
      <ol>
        ${steps.map(
          ([name, to], index) => html`<li key=${to}>
            ${
              index === steps.length - 1
                ? html`<span aria-current="page">${name}</span>`
                : html`<a href=${to}>${name}</a>`
            }
          </li>`,
        )}
      </ol>
    </nav>
  `;
}

const LIVE = {
  live: ["Live", "Numbers refresh automatically. Press to pause."],
  paused: ["Paused", "Press to resume refreshing."],
  "cut off": ["No new numbers", "The page keeps trying. Press to pause."],
};

function Live() {
  const state = useLive();
  const [word, meaning] = LIVE[state];
  return html`
    <button type="button" class="live" aria-pressed=${state !== "paused"} onClick=${() => setLive(state === "paused")} title=${meaning}>
      <span class="dot ${state === "live" ? "on" : ""}" aria-hidden="true"></span>${word}
    </button>
  `;
}

/** Shows an error in place of a view that fails. */
class ErrorBoundary extends Component {
  state = { error: null };

  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    if (!error) return children;
    return html`<${Notice} tone="bad" title="This view failed">
      ${error.message}. Go back to <a href=${queuesAddress()}>the queues</a>, or reload the page.
    <//>`;
  }
}
