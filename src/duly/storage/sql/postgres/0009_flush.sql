-- A flush in one call, for rows that the hub expects to find as it last saw them: they are verified while they
-- are written. Returns false, and has changed nothing, if any of them is not as expected: another hub has
-- changed it. Arrays are columns, in the order of the rows' keys, so that two hubs cannot wait for each other.
--
-- Every statement has a snapshot of its own. So the floor is read after the messages are inserted: if another
-- hub forgot one of them in between, it raised the floor in the same transaction, and it is seen here.
--
-- Plans are made once per connection. Whatever the tables hold by then, rows are found by their keys.
CREATE FUNCTION duly_flush(
    -- messages that are admitted, and the floor (until, mended, barrier) they were judged by
    new_keys bytea[], fingerprints bytea[], kinds text[], recipients text[], new_states smallint[],
    untils bigint[], accepted bigint[], moved bigint[], times bigint[], expiries bigint[], positions bytea[],
    bodies bytea[], listings boolean[], floor_parts bigint[],
    -- messages that are moved
    keys bytea[], were smallint[], states smallint[], answers bytea[], moved_times bigint[],
    -- deliveries that are created
    d_keys bytea[], d_channels text[], d_recipients text[], d_rounds bigint[], d_states smallint[],
    d_attempts bigint[], d_dues bigint[], d_expiries bigint[], d_workers text[], d_errors text[],
    d_kinds smallint[], d_doubts boolean[],
    -- deliveries that are changed: names, what they were, what they become
    c_keys bytea[], c_channels text[], c_recipients text[], c_rounds bigint[],
    was_states smallint[], was_attempts bigint[], was_dues bigint[], was_workers text[], was_errors text[],
    was_doubts boolean[],
    c_states smallint[], c_attempts bigint[], c_dues bigint[], c_workers text[], c_errors text[],
    c_doubts boolean[],
    -- marks that are raised, and what they were
    mark_names text[], was_ns bigint[], was_mss bigint[], ns bigint[], mss bigint[],
    -- items that are only checked
    item_buckets text[], item_names text[], item_bodies bytea[]
) RETURNS boolean LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    found_rows bigint;
BEGIN
    IF cardinality(new_keys) > 0 THEN
        INSERT INTO duly_messages
            (key, fingerprint, kind, recipient, state, until, accepted_at, moved_at, time, expires, position, body,
             listed)
        SELECT * FROM unnest(
            new_keys, fingerprints, kinds, recipients, new_states, untils, accepted, moved, times, expiries,
            positions, bodies, listings
        )
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(new_keys) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
        PERFORM 1 FROM duly_floor
        WHERE one = 1 AND until = floor_parts[1] AND mended = floor_parts[2] AND barrier = floor_parts[3];
        IF NOT FOUND THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;

    IF cardinality(keys) > 0 THEN
        UPDATE duly_messages AS m SET state = new.state, answer = new.answer, moved_at = new.moved_at
        FROM unnest(keys, were, states, answers, moved_times) AS new (key, was, state, answer, moved_at)
        WHERE m.key = new.key AND m.state = new.was;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(keys) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;

    IF cardinality(d_keys) > 0 THEN
        INSERT INTO duly_deliveries
            (key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt)
        SELECT * FROM unnest(
            d_keys, d_channels, d_recipients, d_rounds, d_states, d_attempts, d_dues, d_expiries, d_workers,
            d_errors, d_kinds, d_doubts
        )
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(d_keys) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;

    IF cardinality(c_keys) > 0 THEN
        UPDATE duly_deliveries AS d
        SET state = new.state, attempt = new.attempt, due = new.due, worker = new.worker, error = new.error,
            in_doubt = new.in_doubt
        FROM unnest(
            c_keys, c_channels, c_recipients, c_rounds,
            was_states, was_attempts, was_dues, was_workers, was_errors, was_doubts,
            c_states, c_attempts, c_dues, c_workers, c_errors, c_doubts
        ) AS new (
            key, channel, recipient, round,
            was_state, was_attempt, was_due, was_worker, was_error, was_in_doubt,
            state, attempt, due, worker, error, in_doubt
        )
        WHERE d.key = new.key AND d.channel = new.channel AND d.recipient = new.recipient
            AND d.round = new.round AND d.state = new.was_state AND d.attempt = new.was_attempt
            AND d.due = new.was_due AND d.worker = new.was_worker AND d.error = new.was_error
            AND d.in_doubt = new.was_in_doubt;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(c_keys) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;

    IF cardinality(mark_names) > 0 THEN
        UPDATE duly_marks AS m SET n = new.n, ms = new.ms
        FROM unnest(mark_names, was_ns, was_mss, ns, mss) AS new (mark, was_n, was_ms, n, ms)
        WHERE m.mark = new.mark AND m.n = new.was_n AND m.ms = new.was_ms;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(mark_names) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;

    -- Locked until the commit: a grant cannot be taken back while a command is admitted by it.
    IF cardinality(item_buckets) > 0 THEN
        PERFORM 1 FROM unnest(item_buckets, item_names, item_bodies) AS asked (bucket, name, body)
        JOIN duly_items AS i ON i.bucket = asked.bucket AND i.name = asked.name AND i.body = asked.body
        FOR SHARE OF i;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows <> cardinality(item_buckets) THEN
            RAISE SQLSTATE 'DULY1';
        END IF;
    END IF;
    RETURN true;
EXCEPTION WHEN SQLSTATE 'DULY1' THEN
    RETURN false;
END
$$;
