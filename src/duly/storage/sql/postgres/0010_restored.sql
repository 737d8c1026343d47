-- A ledger made from a backup: what was made until then, and is not in it, may have been accepted since.
ALTER TABLE duly_floor ADD COLUMN restored BIGINT NOT NULL DEFAULT 0;
