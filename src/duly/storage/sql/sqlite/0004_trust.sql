-- What is known of the file itself: whether its pages have checksums.
CREATE TABLE file (
    only      INTEGER PRIMARY KEY CHECK (only = 1),
    checksums INTEGER NOT NULL
);
INSERT INTO file VALUES (1, 0);

-- The floor rises no further than time that can be trusted; see duly.core.trusted_time.
ALTER TABLE floor ADD COLUMN trusted INTEGER NOT NULL DEFAULT 0;
-- A later time that a clock has shown, and that is not confirmed yet.
ALTER TABLE floor ADD COLUMN claim INTEGER NOT NULL DEFAULT 0;
-- A floor that had risen too far was mended then: below `barrier`, only what was made later is fresh.
ALTER TABLE floor ADD COLUMN mended INTEGER NOT NULL DEFAULT 0;
ALTER TABLE floor ADD COLUMN barrier INTEGER NOT NULL DEFAULT 0;
UPDATE floor SET trusted = until;
