-- What a delivery is for, as the number of duly.core.operations.DeliveryKind, and whether an attempt of it may
-- have arrived, are columns. Before, ranges of `round` and how `error` begins said so.
ALTER TABLE duly_deliveries
    ADD COLUMN kind SMALLINT NOT NULL DEFAULT 0,
    ADD COLUMN in_doubt BOOLEAN NOT NULL DEFAULT FALSE;

UPDATE duly_deliveries
SET kind = CASE WHEN round >= 200 THEN 4 WHEN round >= 100 THEN 3 WHEN round >= 50 THEN 2 ELSE 1 END
WHERE round >= 49;

UPDATE duly_deliveries SET in_doubt = TRUE WHERE starts_with(error, 'in doubt: ');
