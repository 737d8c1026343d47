CREATE TABLE duly_cursors (
    stream text NOT NULL COLLATE pg_catalog."C",
    reader text NOT NULL COLLATE pg_catalog."C",
    n bigint NOT NULL
);
CREATE TABLE duly_deliveries (
    key bytea NOT NULL,
    channel text NOT NULL COLLATE pg_catalog."C",
    recipient text NOT NULL COLLATE pg_catalog."C",
    round bigint NOT NULL,
    state smallint NOT NULL,
    attempt bigint NOT NULL,
    due bigint NOT NULL,
    expires bigint NOT NULL,
    worker text NOT NULL,
    error text NOT NULL
);
CREATE TABLE duly_entries (
    stream text NOT NULL COLLATE pg_catalog."C",
    n bigint NOT NULL,
    body bytea NOT NULL,
    at bigint NOT NULL,
    key bytea NOT NULL
);
CREATE TABLE duly_floor (
    one smallint NOT NULL,
    until bigint NOT NULL,
    trusted bigint DEFAULT 0 NOT NULL,
    claim bigint DEFAULT 0 NOT NULL,
    mended bigint DEFAULT 0 NOT NULL,
    barrier bigint DEFAULT 0 NOT NULL,
    CONSTRAINT duly_floor_one_check CHECK ((one = 1))
);
CREATE TABLE duly_items (
    bucket text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    body bytea NOT NULL
);
CREATE TABLE duly_marks (
    mark text NOT NULL COLLATE pg_catalog."C",
    n bigint NOT NULL,
    ms bigint NOT NULL
);
CREATE TABLE duly_messages (
    key bytea NOT NULL,
    fingerprint bytea NOT NULL,
    kind text NOT NULL,
    recipient text NOT NULL,
    state smallint NOT NULL,
    until bigint NOT NULL,
    accepted_at bigint NOT NULL,
    moved_at bigint NOT NULL,
    "time" bigint NOT NULL,
    expires bigint NOT NULL,
    "position" bytea,
    body bytea NOT NULL,
    answer bytea
)
WITH (fillfactor='80');
CREATE TABLE duly_refusals (
    n bigint NOT NULL,
    scope text NOT NULL,
    id text NOT NULL,
    word text NOT NULL,
    reason text NOT NULL,
    at bigint NOT NULL
);
ALTER TABLE duly_refusals ALTER COLUMN n ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME duly_refusals_n_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE duly_schema (
    number bigint NOT NULL,
    name text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE duly_streams (
    stream text NOT NULL COLLATE pg_catalog."C",
    last bigint NOT NULL
);
INSERT INTO duly_cursors VALUES ('conv', 'ann', 1);
INSERT INTO duly_deliveries VALUES ('\x00000000000067617465006576656e742d31', 'alert', 'mail', 101, 0, 0, 1700000000000000, 0, '', '');
INSERT INTO duly_deliveries VALUES ('\x018bcfe568016170702d3100313730303030303030303030315f32', 'device', 'lock-1', 0, 0, 0, 1700000000000000, 0, '', '');
INSERT INTO duly_deliveries VALUES ('\x018bcfe568006170702d3100313730303030303030303030305f31', 'device', 'lock-1', 0, 10, 1, 1700000000000000, 0, '', '');
INSERT INTO duly_entries VALUES ('conv', 1, '\x68656c6c6f', 1700000000000000, '\x');
INSERT INTO duly_entries VALUES ('conv', 2, '\x627965', 1700000000000000, '\x');
INSERT INTO duly_floor VALUES (1, 0, 0, 0, 0, 0);
INSERT INTO duly_items VALUES ('notes', 'a', '\x62');
INSERT INTO duly_marks VALUES ('["lock-1","","app-1"]', 2, 1700000000001);
INSERT INTO duly_messages VALUES ('\x00000000000067617465006576656e742d31', '\xdf2ed85526b825f6', 'alert_event', 'home', 0, 1700086400000000, 1700000000000000, 1700000000000000, 1700000000000000, 0, NULL, '\x7b227365766572697479223a22637269746963616c227d', NULL);
INSERT INTO duly_messages VALUES ('\x018bcfe568016170702d3100313730303030303030303030315f32', '\xc5111e872dc771c2', 'lock_control', 'lock-1', 0, 1700086400000000, 1700000000000000, 1700000000000000, 0, 0, NULL, '\x7b226f70656e223a66616c73657d', NULL);
INSERT INTO duly_messages VALUES ('\x018bcfe568006170702d3100313730303030303030303030305f31', '\xd2994bf7d8f57b0d', 'lock_control', 'lock-1', 10, 1700086400000000, 1700000000000000, 1700000000000000, 0, 0, NULL, '\x7b226f70656e223a747275657d', '\x83a4636f646500a464617461c40137a6726561736f6ea66f70656e6564');
INSERT INTO duly_refusals OVERRIDING SYSTEM VALUE VALUES (1, 'app-1', 'x', 'stale', 'too old', 1700000000000000);
INSERT INTO duly_schema VALUES (1, 'kernel', '2026-11-17 12:39:50.219649+00');
INSERT INTO duly_schema VALUES (2, 'shelves', '2026-11-17 12:39:50.219649+00');
INSERT INTO duly_schema VALUES (3, 'alerts', '2026-11-17 12:39:50.219649+00');
INSERT INTO duly_schema VALUES (4, 'booked', '2026-11-17 12:39:50.219649+00');
INSERT INTO duly_schema VALUES (5, 'trust', '2026-11-17 12:39:50.219649+00');
INSERT INTO duly_schema VALUES (6, 'buckets', '2026-11-17 12:39:50.219649+00');
INSERT INTO duly_streams VALUES ('conv', 2);
SELECT pg_catalog.setval('duly_refusals_n_seq', 1, true);
ALTER TABLE ONLY duly_cursors
    ADD CONSTRAINT duly_cursors_pkey PRIMARY KEY (stream, reader);
ALTER TABLE ONLY duly_deliveries
    ADD CONSTRAINT duly_deliveries_pkey PRIMARY KEY (key, channel, recipient, round);
ALTER TABLE ONLY duly_entries
    ADD CONSTRAINT duly_entries_pkey PRIMARY KEY (stream, n);
ALTER TABLE ONLY duly_floor
    ADD CONSTRAINT duly_floor_pkey PRIMARY KEY (one);
ALTER TABLE ONLY duly_items
    ADD CONSTRAINT duly_items_pkey PRIMARY KEY (bucket, name);
ALTER TABLE ONLY duly_marks
    ADD CONSTRAINT duly_marks_pkey PRIMARY KEY (mark);
ALTER TABLE ONLY duly_messages
    ADD CONSTRAINT duly_messages_pkey PRIMARY KEY (key);
ALTER TABLE ONLY duly_refusals
    ADD CONSTRAINT duly_refusals_pkey PRIMARY KEY (n);
ALTER TABLE ONLY duly_schema
    ADD CONSTRAINT duly_schema_pkey PRIMARY KEY (number);
ALTER TABLE ONLY duly_streams
    ADD CONSTRAINT duly_streams_pkey PRIMARY KEY (stream);
CREATE INDEX duly_deliveries_booked ON duly_deliveries USING btree (channel, recipient) WHERE (state = 0);
CREATE INDEX duly_deliveries_due ON duly_deliveries USING btree (channel, due) WHERE (state < 10);
CREATE INDEX duly_messages_alerts ON duly_messages USING btree (accepted_at, key) WHERE (kind = 'alert_event'::text);
CREATE INDEX duly_messages_until ON duly_messages USING btree (until) WHERE (until < '4611686018427387903'::bigint);
