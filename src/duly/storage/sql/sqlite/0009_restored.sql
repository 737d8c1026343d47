-- A ledger made from a backup: what was made until then, and is not in it, may have been accepted since.
ALTER TABLE floor ADD COLUMN restored INTEGER NOT NULL DEFAULT 0;
