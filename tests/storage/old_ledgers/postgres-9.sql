CREATE TYPE duly_admission AS (
	key bytea,
	fingerprint bytea,
	kind text,
	recipient text,
	state smallint,
	until bigint,
	accepted_at bigint,
	moved_at bigint,
	"time" bigint,
	expires bigint,
	"position" bytea,
	body bytea,
	listed boolean
);
CREATE TYPE duly_check AS (
	bucket text,
	name text,
	body bytea
);
CREATE TYPE duly_delivery_change AS (
	key bytea,
	channel text,
	recipient text,
	round bigint,
	was_state smallint,
	was_attempt bigint,
	was_due bigint,
	was_worker text,
	was_error text,
	was_in_doubt boolean,
	state smallint,
	attempt bigint,
	due bigint,
	worker text,
	error text,
	in_doubt boolean
);
CREATE TYPE duly_move AS (
	key bytea,
	was_state smallint,
	state smallint,
	answer bytea,
	moved_at bigint
);
CREATE TYPE duly_new_delivery AS (
	key bytea,
	channel text,
	recipient text,
	round bigint,
	state smallint,
	attempt bigint,
	due bigint,
	expires bigint,
	worker text,
	error text,
	kind smallint,
	in_doubt boolean
);
CREATE TYPE duly_rise AS (
	mark text,
	was_n bigint,
	was_ms bigint,
	n bigint,
	ms bigint
);
CREATE FUNCTION duly_flush(admissions duly_admission[], moves duly_move[], new_deliveries duly_new_delivery[], delivery_changes duly_delivery_change[], rises duly_rise[], checks duly_check[], judged_by bigint[]) RETURNS boolean
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
DECLARE
    found_rows bigint;
BEGIN
    IF cardinality(admissions) > 0 THEN
        INSERT INTO duly_messages
            (key, fingerprint, kind, recipient, state, until, accepted_at, moved_at, time, expires, position, body,
             listed)
        SELECT * FROM unnest(admissions)
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(admissions) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
        PERFORM 1 FROM duly_floor
        WHERE one = 1 AND until < judged_by[1]
            AND (barrier < judged_by[1] OR mended = judged_by[2] AND barrier = judged_by[3]);
        IF NOT FOUND THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;
    IF cardinality(moves) > 0 THEN
        UPDATE duly_messages AS m SET state = new.state, answer = new.answer, moved_at = new.moved_at
        FROM unnest(moves) AS new
        WHERE m.key = new.key AND m.state = new.was_state;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(moves) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;
    IF cardinality(new_deliveries) > 0 THEN
        INSERT INTO duly_deliveries
            (key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt)
        SELECT * FROM unnest(new_deliveries)
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(new_deliveries) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;
    IF cardinality(delivery_changes) > 0 THEN
        UPDATE duly_deliveries AS d
        SET state = new.state, attempt = new.attempt, due = new.due, worker = new.worker, error = new.error,
            in_doubt = new.in_doubt
        FROM unnest(delivery_changes) AS new
        WHERE d.key = new.key AND d.channel = new.channel AND d.recipient = new.recipient
            AND d.round = new.round AND d.state = new.was_state AND d.attempt = new.was_attempt
            AND d.due = new.was_due AND d.worker = new.was_worker AND d.error = new.was_error
            AND d.in_doubt = new.was_in_doubt;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(delivery_changes) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;
    IF cardinality(rises) > 0 THEN
        UPDATE duly_marks AS m SET n = new.n, ms = new.ms
        FROM unnest(rises) AS new
        WHERE m.mark = new.mark AND m.n = new.was_n AND m.ms = new.was_ms;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(rises) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;
    -- Locked until the commit: a grant cannot be taken back while a command is admitted by it.
    IF cardinality(checks) > 0 THEN
        PERFORM 1 FROM unnest(checks) AS asked
        JOIN duly_items AS i ON i.bucket = asked.bucket AND i.name = asked.name AND i.body = asked.body
        FOR SHARE OF i;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(checks) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;
    RETURN true;
EXCEPTION WHEN SQLSTATE 'DULY1' THEN
    RETURN false;
END
$$;
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
    error text NOT NULL,
    kind smallint DEFAULT 0 NOT NULL,
    in_doubt boolean DEFAULT false NOT NULL
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
    answer bytea,
    listed boolean DEFAULT false NOT NULL
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
INSERT INTO duly_deliveries VALUES ('\x00000000000067617465006576656e742d31', 'alert', 'mail', 101, 0, 0, 1700000000000000, 0, '', '', 0, false);
INSERT INTO duly_deliveries VALUES ('\x018bcfe568016170702d3100313730303030303030303030315f32', 'device', 'lock-1', 0, 0, 0, 1700000000000000, 0, '', '', 0, false);
INSERT INTO duly_deliveries VALUES ('\x018bcfe568006170702d3100313730303030303030303030305f31', 'device', 'lock-1', 0, 10, 1, 1700000000000000, 0, '', '', 0, false);
INSERT INTO duly_entries VALUES ('conv', 1, '\x68656c6c6f', 1700000000000000, '\x');
INSERT INTO duly_entries VALUES ('conv', 2, '\x627965', 1700000000000000, '\x');
INSERT INTO duly_floor VALUES (1, 0, 0, 0, 0, 0);
INSERT INTO duly_items VALUES ('notes', 'a', '\x62');
INSERT INTO duly_marks VALUES ('["lock-1","","app-1"]', 2, 1700000000001);
INSERT INTO duly_messages VALUES ('\x018bcfe568016170702d3100313730303030303030303030315f32', '\xc5111e872dc771c2', 'lock_control', 'lock-1', 0, 1700086400000000, 1700000000000000, 1700000000000000, 0, 0, NULL, '\x7b226f70656e223a66616c73657d', NULL, false);
INSERT INTO duly_messages VALUES ('\x00000000000067617465006576656e742d31', '\xdf2ed85526b825f6', 'alert_event', 'home', 0, 1700086400000000, 1700000000000000, 1700000000000000, 1700000000000000, 0, NULL, '\x7b227365766572697479223a22637269746963616c227d', NULL, true);
INSERT INTO duly_messages VALUES ('\x018bcfe568006170702d3100313730303030303030303030305f31', '\xd2994bf7d8f57b0d', 'lock_control', 'lock-1', 10, 1700086400000000, 1700000000000000, 1700000000000000, 0, 0, NULL, '\x7b226f70656e223a747275657d', '\x83a4636f646500a464617461c40137a6726561736f6ea66f70656e6564', false);
INSERT INTO duly_refusals OVERRIDING SYSTEM VALUE VALUES (1, 'app-1', 'x', 'stale', 'too old', 1700000000000000);
INSERT INTO duly_schema VALUES (1, 'kernel', '2026-11-17 12:45:31.747599+00');
INSERT INTO duly_schema VALUES (2, 'shelves', '2026-11-17 12:45:31.747599+00');
INSERT INTO duly_schema VALUES (3, 'alerts', '2026-11-17 12:45:31.747599+00');
INSERT INTO duly_schema VALUES (4, 'booked', '2026-11-17 12:45:31.747599+00');
INSERT INTO duly_schema VALUES (5, 'trust', '2026-11-17 12:45:31.747599+00');
INSERT INTO duly_schema VALUES (6, 'buckets', '2026-11-17 12:45:31.747599+00');
INSERT INTO duly_schema VALUES (7, 'delivery_kinds', '2026-11-17 12:45:31.747599+00');
INSERT INTO duly_schema VALUES (8, 'listed', '2026-11-17 12:45:31.747599+00');
INSERT INTO duly_schema VALUES (9, 'flush', '2026-11-17 12:45:31.747599+00');
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
CREATE INDEX duly_messages_listed ON duly_messages USING btree (kind, accepted_at, key) WHERE listed;
CREATE INDEX duly_messages_until ON duly_messages USING btree (until) WHERE (until < '4611686018427387903'::bigint);
