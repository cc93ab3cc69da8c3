"""What to do about each error. A test compares the names with the classes of the package."""

from __future__ import annotations

from typing import Final

ACTIONS: Final = {
    "JetStreamProviderError": "Catch it to catch every error of this package.",
    "TerminalError": "Change the input, the declaration or the server, as the message says. Airflow doesn't retry it.",
    "TransientError": "Try again later. Airflow retries the task as its `retries` say.",
    "ConnectionSettingsError": "Correct the connection. The message names the field, never its value.",
    "AuthenticationError": "Check the credentials. The message says which kind was sent.",
    "TLSError": "Check `tls_ca_file`, the server's certificate, and whether the server has TLS.",
    "JetStreamDisabledError": "Start the server with JetStream, or enable it for the account.",
    "ServerTooOldError": "Upgrade nats-server to the version that the message names, 2.10.27 at least.",
    "PermissionDeniedError": (
        "Allow the action on the subject that the message names, or connect as a user of another role;"
        " `jetstream-queue permissions` prints the policy of a role."
    ),
    "SubscriptionRefusedError": (
        "Raise `max_subscriptions` (or `max_sub_tokens`) of the server, or the limit of the user or account; or divide"
        " the work among several processes, each with a connection of its own."
    ),
    "QueueDeclarationError": "Correct the fields that the message lists.",
    "ProvisioningError": "Do what the server's reason says, then provision again: it goes on where it ended.",
    "DriftError": (
        "Declare what exists, or make the change by hand as the message says; `jetstream-queue queue plan` shows it."
    ),
    "NotFoundError": "Provision the queue, or correct the name or the JetStream domain.",
    "UnsuitableQueueError": "Change the queue's configuration as the message says, or don't use this operation on it.",
    "ArgumentError": "Correct the argument that the message names.",
    "JobError": "Correct the job that the message names by its number.",
    "JobNotSerializableError": "Give a body of bytes, text or JSON.",
    "JobTooLargeError": "Store the data elsewhere and publish its address, or raise `max_msg_size` or `max_payload`.",
    "JobNotWaitingError": "Wait for its next delivery; the text says what proof is missing that it waits.",
    "WrongStreamError": (
        "See which stream captures the subject. The job is stored there: remove it, correct the subject or the"
        " connection's JetStream domain, then publish again."
    ),
    "DeadLetterGoneError": "Look at the letters again: this one was redriven, parked, done or removed.",
    "SelectionError": "Correct the selection. The message names its field.",
    "RedriveRequestError": "Change the request as the message says. Nothing was done.",
    "JobsDeadError": "Read the errors that the message quotes, repair the cause, then redrive the letters.",
    "JobsCancelledError": "Ask who cancelled them, by the message. Raise `max_cancelled` where that is expected.",
    "JobsUnaccountedError": (
        "Find out whether the jobs were done before you publish them again. Declare `sample_freq` `100%`, or let the"
        " workers store completions."
    ),
    "JobsIncompleteError": "See how the other jobs ended, and redrive the dead ones.",
    "QueueGoneError": "Find out what deleted the queue. Provision it, and publish what wasn't done.",
    "JobReportsGoneError": "Raise the `max_age` of the events stream, or read the reports earlier.",
    "EventLoopError": "Use the awaitable twin of the method: its name begins with `a`.",
    "UnreachableError": "Check host, port, firewall, and whether the server runs.",
    "DeadlineError": "See why it took so long; where the time is right, raise the limit that the message names.",
    "RedriveError": "Run the redrive again. The message says why the letter stayed.",
    "CopyTooLargeError": "Raise `max_msg_size`, or repair the letter so that its job is smaller.",
    "LeaseHeldError": "Wait for the other operation, which the message names, or raise `lease_timeout`.",
    "LeaseLostError": "Run the operation again: it goes on with the rest.",
    "QueueFullError": "Start more workers, raise the queue's limits, or publish with `room_timeout`.",
    "JobsStalledError": "Start or resume a consumer that takes the jobs. A retry goes on waiting.",
    "ApiError": "Look up the server's code and text, which the message quotes.",
    "PublishError": "Publish again with the same ids: `report` says which jobs are stored, and no job is stored twice.",
    "PublishRefusedError": "Correct the jobs that the message names, then publish again.",
    "PublishIncompleteError": "Publish again with the same ids, as a retry of the task does.",
    "WireError": "It is retried. If it persists, look for what changes bytes between client and server.",
    "HandlerNotFoundError": "Correct `--handler package.module:function`, or the folder in which the worker starts.",
    "GiveUpError": "Read the reason in the dead letter. Your handler raises it for jobs that can never be done.",
    "WorkerSetupError": "Correct the setting that the message names. The worker hasn't taken a job.",
    "InvalidBodyError": "Correct the publisher or the model. The dead letter has the problems and the body.",
    "JobExpiredError": "Start more workers, or publish with a later `Job-Expires`.",
    "InvalidExecuteAtError": "Publish `X-Execute-At` as a time with a zone, such as `2026-01-01T00:00:00Z`.",
    "HandlerDeadlineError": "Make the handler faster, or raise `--deadline`. The job is delivered again.",
    "RetryLaterError": "Nothing: your handler raises it, and the job is delivered again after the delay.",
    "HandlerCutOffError": "Raise `--grace` where handlers need longer. The job is delivered again.",
    "HandlerDiedError": "Look for a crash or a lack of memory. The job is delivered again.",
    "WorkerStuckError": "Let the supervisor restart the worker, and find out where handlers hang.",
    "NotDueError": "Nothing: the job is delivered again when it is due.",
    "SparkOptionError": "Correct the option, the schema or the mode. The message says what was expected.",
    "DataLossError": (
        "Keep messages longer. Accept what the error names with `acceptedLoss`, or any loss with"
        " `failOnDataLoss=false`."
    ),
    "RepairContractError": "Correct the repair. The message names letters and what is wrong with them.",
    "RepairedLettersError": "Restore the files of the repair, or repair the snapshot again.",
    "RowsNotStoredError": "Write the rows that the message names again, with the same ids.",
    "SparkSettingsError": "Correct the connection, `spark_conf` or what is installed.",
    "SparkApplicationError": "Read the log of the Spark application. The next try may succeed.",
    "DevStackError": "Read the lines of the log that the message quotes, then start `jetstream-queue dev` again.",
    "LettersUnreadError": "Wait: the page shows the letters once they are read.",
}
