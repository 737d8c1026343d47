-- The kernel's tables. Times are microseconds; states are the numbers of duly.core.lifecycle.State.

-- What was admitted. The key leads with the id's own time, so the tree grows at its right edge.
CREATE TABLE messages (
    key         BLOB PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    kind        TEXT NOT NULL,
    recipient   TEXT NOT NULL,
    state       INTEGER NOT NULL,
    until       INTEGER NOT NULL,
    accepted_at INTEGER NOT NULL,
    moved_at    INTEGER NOT NULL,
    time        INTEGER NOT NULL,
    expires     INTEGER NOT NULL,
    position    BLOB,
    body        BLOB NOT NULL,
    answer      BLOB
) WITHOUT ROWID;

-- Pruning walks by `until`; what is kept for ever (2^62 - 1) need not be walked.
CREATE INDEX messages_until ON messages (until) WHERE until < 4611686018427387903;

-- One attempt chain per (message, channel, recipient, round).
CREATE TABLE deliveries (
    key       BLOB NOT NULL,
    channel   TEXT NOT NULL,
    recipient TEXT NOT NULL,
    round     INTEGER NOT NULL,
    state     INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    due       INTEGER NOT NULL,
    expires   INTEGER NOT NULL,
    worker    TEXT NOT NULL,
    error     TEXT NOT NULL,
    PRIMARY KEY (key, channel, recipient, round)
) WITHOUT ROWID;

-- Only what has not ended is ever searched by time.
CREATE INDEX deliveries_due ON deliveries (channel, due) WHERE state < 10;

CREATE TABLE streams (
    stream TEXT PRIMARY KEY,
    last   INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE entries (
    stream TEXT NOT NULL,
    n      INTEGER NOT NULL,
    body   BLOB NOT NULL,
    at     INTEGER NOT NULL,
    key    BLOB NOT NULL,
    PRIMARY KEY (stream, n)
) WITHOUT ROWID;

CREATE TABLE cursors (
    stream TEXT NOT NULL,
    reader TEXT NOT NULL,
    n      INTEGER NOT NULL,
    PRIMARY KEY (stream, reader)
) WITHOUT ROWID;

-- High-water marks: `n` decides, `ms` tells a sender that counts anew from a late message.
CREATE TABLE marks (
    mark TEXT PRIMARY KEY,
    n    INTEGER NOT NULL,
    ms   INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE refusals (
    n      INTEGER PRIMARY KEY AUTOINCREMENT,
    scope  TEXT NOT NULL,
    id     TEXT NOT NULL,
    word   TEXT NOT NULL,
    reason TEXT NOT NULL,
    at     INTEGER NOT NULL
);

-- The floor: everything whose `until` lies below it may have been forgotten.
CREATE TABLE floor (
    only  INTEGER PRIMARY KEY CHECK (only = 1),
    until INTEGER NOT NULL
);
INSERT INTO floor VALUES (1, 0);
