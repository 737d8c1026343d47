-- The kernel's tables. Times are microseconds; states are the numbers of duly.core.lifecycle.State.
-- Text is ordered by its code points, whatever the database's language: the same in every ledger.

-- What was admitted. The key leads with the id's own time, so the tree grows at its right edge.
-- Rows are moved through their states in place: room is left in each page for it.
CREATE TABLE duly_messages (
    key         BYTEA PRIMARY KEY,
    fingerprint BYTEA NOT NULL,
    kind        TEXT NOT NULL,
    recipient   TEXT NOT NULL,
    state       SMALLINT NOT NULL,
    until       BIGINT NOT NULL,
    accepted_at BIGINT NOT NULL,
    moved_at    BIGINT NOT NULL,
    time        BIGINT NOT NULL,
    expires     BIGINT NOT NULL,
    position    BYTEA,
    body        BYTEA NOT NULL,
    answer      BYTEA
) WITH (fillfactor = 80);

-- Pruning walks by `until`; what is kept for ever (2^62 - 1) need not be walked.
CREATE INDEX duly_messages_until ON duly_messages (until) WHERE until < 4611686018427387903;

-- One attempt chain per (message, channel, recipient, round).
CREATE TABLE duly_deliveries (
    key       BYTEA NOT NULL,
    channel   TEXT COLLATE "C" NOT NULL,
    recipient TEXT COLLATE "C" NOT NULL,
    round     BIGINT NOT NULL,
    state     SMALLINT NOT NULL,
    attempt   BIGINT NOT NULL,
    due       BIGINT NOT NULL,
    expires   BIGINT NOT NULL,
    worker    TEXT NOT NULL,
    error     TEXT NOT NULL,
    PRIMARY KEY (key, channel, recipient, round)
);

-- Only what has not ended is ever searched by time.
CREATE INDEX duly_deliveries_due ON duly_deliveries (channel, due) WHERE state < 10;

CREATE TABLE duly_streams (
    stream TEXT COLLATE "C" PRIMARY KEY,
    last   BIGINT NOT NULL
);

CREATE TABLE duly_entries (
    stream TEXT COLLATE "C" NOT NULL,
    n      BIGINT NOT NULL,
    body   BYTEA NOT NULL,
    at     BIGINT NOT NULL,
    key    BYTEA NOT NULL,
    PRIMARY KEY (stream, n)
);

CREATE TABLE duly_cursors (
    stream TEXT COLLATE "C" NOT NULL,
    reader TEXT COLLATE "C" NOT NULL,
    n      BIGINT NOT NULL,
    PRIMARY KEY (stream, reader)
);

-- High-water marks: `n` decides, `ms` tells a sender that counts anew from a late message.
CREATE TABLE duly_marks (
    mark TEXT COLLATE "C" PRIMARY KEY,
    n    BIGINT NOT NULL,
    ms   BIGINT NOT NULL
);

CREATE TABLE duly_refusals (
    n      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope  TEXT NOT NULL,
    id     TEXT NOT NULL,
    word   TEXT NOT NULL,
    reason TEXT NOT NULL,
    at     BIGINT NOT NULL
);

-- The floor: everything whose `until` lies below it may have been forgotten.
CREATE TABLE duly_floor (
    one   SMALLINT PRIMARY KEY CHECK (one = 1),
    until BIGINT NOT NULL
);
INSERT INTO duly_floor VALUES (1, 0);
