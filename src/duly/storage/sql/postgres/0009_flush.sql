-- A flush in one call, for rows that the hub expects to find as it last saw them: they are verified while they
-- are written. Returns false, and has changed nothing, if any of them is not as expected: another hub has
-- changed it. Rows come in the order of their keys, so that two hubs cannot wait for each other.
--
-- Every statement has a snapshot of its own. So the floor is read after the messages are inserted: if another
-- hub forgot one of them in between, it raised the floor in the same transaction, and it is seen here.
--
-- Plans are made once per connection. Whatever the tables hold by then, rows are found by their keys.

-- A message that is admitted.
CREATE TYPE duly_admission AS (
    key bytea, fingerprint bytea, kind text, recipient text, state smallint, until bigint, accepted_at bigint,
    moved_at bigint, time bigint, expires bigint, position bytea, body bytea, listed boolean
);
-- A message that is moved.
CREATE TYPE duly_move AS (key bytea, was_state smallint, state smallint, answer bytea, moved_at bigint);
-- A delivery that is created.
CREATE TYPE duly_new_delivery AS (
    key bytea, channel text, recipient text, round bigint, state smallint, attempt bigint, due bigint,
    expires bigint, worker text, error text, kind smallint, in_doubt boolean
);
-- A delivery that is changed: its name, what it was, what it becomes.
CREATE TYPE duly_delivery_change AS (
    key bytea, channel text, recipient text, round bigint,
    was_state smallint, was_attempt bigint, was_due bigint, was_worker text, was_error text, was_in_doubt boolean,
    state smallint, attempt bigint, due bigint, worker text, error text, in_doubt boolean
);
-- A mark that is raised.
CREATE TYPE duly_rise AS (mark text, was_n bigint, was_ms bigint, n bigint, ms bigint);
-- An item that is only checked.
CREATE TYPE duly_check AS (bucket text, name text, body bytea);

-- `judged_by`: the least `until` of the admissions, and the floor's `mended` and `barrier` when they were judged.
CREATE FUNCTION duly_flush(
    admissions duly_admission[], moves duly_move[], new_deliveries duly_new_delivery[],
    delivery_changes duly_delivery_change[], rises duly_rise[], checks duly_check[], judged_by bigint[]
) RETURNS boolean LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
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
