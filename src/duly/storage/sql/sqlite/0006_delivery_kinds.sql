-- What a delivery is for, as the number of duly.core.operations.DeliveryKind, and whether an attempt of it may
-- have arrived, are columns. Before, ranges of `round` and how `error` begins said so.
ALTER TABLE deliveries ADD COLUMN kind INTEGER NOT NULL DEFAULT 0;
ALTER TABLE deliveries ADD COLUMN in_doubt INTEGER NOT NULL DEFAULT 0;

UPDATE deliveries
SET kind = CASE WHEN round >= 200 THEN 4 WHEN round >= 100 THEN 3 WHEN round >= 50 THEN 2 ELSE 1 END
WHERE round >= 49;

UPDATE deliveries SET in_doubt = 1 WHERE substr(error, 1, 10) = 'in doubt: ';
