-- The floor rises no further than time that can be trusted; see duly.core.trusted_time.
ALTER TABLE duly_floor ADD COLUMN trusted BIGINT NOT NULL DEFAULT 0;
-- A later time that a clock has shown, and that is not confirmed yet.
ALTER TABLE duly_floor ADD COLUMN claim BIGINT NOT NULL DEFAULT 0;
-- A floor that had risen too far was mended then: below `barrier`, only what was made later is fresh.
ALTER TABLE duly_floor ADD COLUMN mended BIGINT NOT NULL DEFAULT 0;
ALTER TABLE duly_floor ADD COLUMN barrier BIGINT NOT NULL DEFAULT 0;
UPDATE duly_floor SET trusted = until;
