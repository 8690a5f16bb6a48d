//! The saved result: where it goes, decided and tried before anything starts, and the file itself, written while
//! the records come in: a temporary file beside it, renamed when it is whole. Memory use does not grow with it.

use std::fs::{File, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use proto::plan::Load;
use tempfile::{NamedTempFile, PersistError};

use crate::args::OutputArgs;
use crate::exit::{Exit, Trouble};
use crate::signals::Signals;

/// A place for a result that could be written to when it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    path: PathBuf,
    may_replace: bool,
}

/// Why a file cannot be made, without the temporary name that nobody asked about.
fn why(error: &std::io::Error) -> String {
    if error.kind() == std::io::ErrorKind::NotFound {
        return "its folder does not exist; make it first, or use --save-dir".to_owned();
    }
    let text = error.to_string();
    text.split_once(" at path ").map_or(text.clone(), |(why, _)| why.to_owned())
}

impl Destination {
    /// The place that the flags name, if any.
    pub fn choose(args: &OutputArgs, load: &Load) -> Result<Option<Destination>, Trouble> {
        let path = match (&args.save_result, &args.save_dir) {
            (None, None) => return Ok(None),
            (Some(name), Some(dir)) if is_bare(name) => dir.join(name),
            (Some(path), _) => path.clone(),
            (None, Some(dir)) => dir.join(name_of(load, SystemTime::now())),
        };
        Destination::at(path, args.force).map(Some)
    }

    fn at(path: PathBuf, may_replace: bool) -> Result<Destination, Trouble> {
        let refuse = |why: String| Err(Trouble::new(Exit::OutputFile, why));
        let shown = path.display();
        if path.file_name().is_none() {
            return refuse(format!("{shown} does not name a file to save to"));
        }
        let path = match std::fs::metadata(&path) {
            Ok(found) if found.is_dir() => {
                return refuse(format!("{shown} is a folder; name a file in it, or use --save-dir {shown}"));
            }
            Ok(found) if !found.is_file() => return refuse(format!("{shown} is not a regular file")),
            Ok(_) if !may_replace => {
                return refuse(format!("{shown} exists; use another name, or --force to replace it"));
            }
            // A link keeps pointing at what is written.
            Ok(_) => std::fs::canonicalize(&path).unwrap_or(path),
            Err(_) => path,
        };
        let destination = Destination { path, may_replace };
        // Only trying tells whether one may write there.
        match destination.temporary() {
            Ok(_) => Ok(destination),
            Err(error) => {
                refuse(format!("{} cannot be written: {}", destination.path.display(), why(&error)))
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn folder(&self) -> &Path {
        match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        }
    }

    /// The same name in the folder for temporary files, where nothing is replaced.
    fn refuge(&self) -> Destination {
        let name = self.path.file_name().unwrap_or_default();
        Destination { path: std::env::temp_dir().join(name), may_replace: false }
    }

    fn temporary(&self) -> io::Result<NamedTempFile> {
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(self.path.file_name().unwrap_or_default());
        prefix.push(".");
        tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(".tmp")
            // The user's umask decides, as for any file of theirs.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(self.folder())
    }
}

/// Bytes that are gathered before they are written.
const GATHERED: usize = 1 << 16;

/// A result that is being written. Where its place fails, a full disk or a folder that is gone, it moves to the
/// folder for temporary files: what was measured is not lost with the place.
#[derive(Debug)]
pub struct Writing {
    place: Place,
    /// What is not written yet.
    gathered: Vec<u8>,
    /// Bytes that are safely in the file.
    written: u64,
    rows: u64,
    /// Why it had to move.
    moved: Option<io::Error>,
    signals: Signals,
}

/// A file that has no name yet, and the one that it is to have.
#[derive(Debug)]
struct Place {
    destination: Destination,
    file: NamedTempFile,
}

/// A result that was written.
#[derive(Debug)]
pub struct Saved {
    /// Where it is: not where it should be if that name was taken meanwhile, or if that place failed.
    pub path: PathBuf,
    /// Why that place failed.
    pub moved: Option<io::Error>,
}

impl Writing {
    /// Begins with the report, as it came.
    pub fn begin(destination: &Destination, report_json: &str, signals: &Signals) -> io::Result<Writing> {
        let open = report_json.trim_end().strip_suffix('}').ok_or(io::ErrorKind::InvalidData)?;
        let (place, moved) = match Place::at(destination.clone(), signals) {
            Ok(place) => (place, None),
            Err(error) => (Place::at(destination.refuge(), signals)?, Some(error)),
        };
        let gathered = format!("{open},\n\"raw_metrics\":[").into_bytes();
        Ok(Writing { place, gathered, written: 0, rows: 0, moved, signals: signals.clone() })
    }

    /// Adds a record's line, as it came.
    pub fn row(&mut self, line: &str) -> io::Result<()> {
        self.gathered.extend_from_slice(if self.rows == 0 { b"\n" } else { b",\n" });
        self.rows += 1;
        self.gathered.extend_from_slice(line.trim_end().as_bytes());
        if self.gathered.len() < GATHERED { Ok(()) } else { self.write() }
    }

    /// Ends the file and gives it its name.
    pub fn finish(mut self) -> io::Result<Saved> {
        self.gathered.extend_from_slice(b"\n]}\n");
        self.write()?;
        if let Err(error) = self.place.file.as_file().sync_all() {
            self.take_refuge(error)?;
        }
        let Writing { place, written, moved, signals, .. } = self;
        match (place.persist(&signals), moved) {
            (Ok(path), moved) => Ok(Saved { path, moved }),
            (Err((error, place)), None) => {
                let place = place.refuge(written, &signals)?;
                let path = place.persist(&signals).map_err(|(error, _)| error)?;
                Ok(Saved { path, moved: Some(error) })
            }
            (Err((error, _)), Some(_)) => Err(error),
        }
    }

    fn write(&mut self) -> io::Result<()> {
        if let Err(error) = self.place.file.write_all(&self.gathered) {
            self.take_refuge(error)?;
            self.place.file.write_all(&self.gathered)?;
        }
        self.written += self.gathered.len() as u64;
        self.gathered.clear();
        Ok(())
    }

    /// Goes on elsewhere; once.
    fn take_refuge(&mut self, why: io::Error) -> io::Result<()> {
        if self.moved.is_some() {
            return Err(why);
        }
        self.place = self.place.refuge(self.written, &self.signals)?;
        self.moved = Some(why);
        Ok(())
    }
}

impl Place {
    fn at(destination: Destination, signals: &Signals) -> io::Result<Place> {
        let file = destination.temporary()?;
        signals.add_litter(file.path());
        Ok(Place { destination, file })
    }

    /// Another in the folder for temporary files, with the first bytes of this one.
    fn refuge(&self, bytes: u64, signals: &Signals) -> io::Result<Place> {
        let mut other = Place::at(self.destination.refuge(), signals)?;
        let mut old = self.file.as_file().try_clone()?;
        old.rewind()?;
        io::copy(&mut old.take(bytes), &mut other.file)?;
        signals.forget_litter(self.file.path());
        Ok(other)
    }

    /// Gives the file its name.
    fn persist(self, signals: &Signals) -> Result<PathBuf, (io::Error, Place)> {
        let Place { destination, file } = self;
        let temporary = file.path().to_owned();
        let named = if destination.may_replace {
            file.persist(&destination.path).map(|_| destination.path.clone())
        } else {
            persist_under_a_free_name(file, &destination.path)
        };
        match named {
            Ok(path) => {
                signals.forget_litter(&temporary);
                // The rename itself; some file systems cannot, and the data is safe already.
                let _ = File::open(destination.folder()).and_then(|folder| folder.sync_all());
                Ok(path)
            }
            Err(refused) => Err((refused.error, Place { destination, file: refused.file })),
        }
    }
}

/// Nothing measured is lost, and nothing that exists is replaced: `name.json`, else `name-2.json` and so on.
fn persist_under_a_free_name(mut file: NamedTempFile, path: &Path) -> Result<PathBuf, PersistError> {
    let mut candidate = path.to_owned();
    for n in 2..1000 {
        match file.persist_noclobber(&candidate) {
            Ok(_) => return Ok(candidate),
            Err(refused) if refused.error.kind() == io::ErrorKind::AlreadyExists => file = refused.file,
            Err(refused) => return Err(refused),
        }
        let mut name = path.file_stem().unwrap_or_default().to_owned();
        name.push(format!("-{n}"));
        if let Some(extension) = path.extension() {
            name.push(".");
            name.push(extension);
        }
        candidate = path.with_file_name(name);
    }
    Err(PersistError { error: io::ErrorKind::AlreadyExists.into(), file })
}

fn is_bare(path: &Path) -> bool {
    let mut parts = path.components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}

/// `benchd-closed-c8-20250102T030405Z.json`, `benchd-open-r2.5-….json`.
fn name_of(load: &Load, now: SystemTime) -> String {
    let what = match load {
        Load::Closed { concurrency, .. } => format!("closed-c{concurrency}"),
        Load::Open { request_rate_per_s, .. } => format!("open-r{request_rate_per_s}"),
    };
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    format!("benchd-{what}-{}.json", utc(seconds))
}

/// Seconds of the Unix epoch as `20250102T030405Z`.
fn utc(epoch_s: u64) -> String {
    let (days, second) = (epoch_s / 86_400, epoch_s % 86_400);
    // Days since 1 March of the year 0, in eras of 400 years: Howard Hinnant's civil_from_days.
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}T{:02}{:02}{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::sample;

    fn output(save_result: Option<&Path>, save_dir: Option<&Path>, force: bool) -> OutputArgs {
        OutputArgs {
            save_result: save_result.map(Path::to_owned),
            save_dir: save_dir.map(Path::to_owned),
            force,
            ..OutputArgs::default()
        }
    }

    fn choose(args: &OutputArgs) -> Result<Option<Destination>, Trouble> {
        Destination::choose(args, &sample::report().config.load)
    }

    #[test]
    fn a_bare_name_goes_to_the_folder_and_a_path_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        let path = |args| choose(&args).unwrap().unwrap().path;
        assert_eq!(
            path(output(Some(Path::new("r.json")), Some(dir.path()), false)),
            dir.path().join("r.json")
        );
        let elsewhere = other.path().join("r.json");
        assert_eq!(path(output(Some(&elsewhere), Some(dir.path()), false)), elsewhere);
        let made = path(output(None, Some(dir.path()), false));
        assert!(made.file_name().unwrap().to_str().unwrap().starts_with("benchd-closed-c8-2"), "{made:?}");
        assert_eq!(choose(&output(None, None, false)).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_written_is_refused_beforehand() {
        let dir = tempfile::tempdir().unwrap();
        let existing = dir.path().join("r.json");
        std::fs::write(&existing, "precious").unwrap();
        for (path, want) in [
            (existing.clone(), "exists; use another name, or --force"),
            (dir.path().join("no/r.json"), "its folder does not exist"),
            (existing.join("r.json"), "cannot be written"),
            (dir.path().to_owned(), "is a folder"),
            (PathBuf::from("/dev/null"), "is not a regular file"),
        ] {
            let trouble = choose(&output(Some(&path), None, false)).unwrap_err();
            assert_eq!(trouble.exit.code(), 10);
            assert!(trouble.message.contains(want), "{trouble}");
        }
        assert!(choose(&output(Some(&existing), None, true)).is_ok());
        assert_eq!(std::fs::read_to_string(&existing).unwrap(), "precious");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the trial leaves nothing behind");
    }

    #[test]
    fn the_file_is_the_report_with_the_records_added() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        let destination = choose(&output(Some(&path), None, false)).unwrap().unwrap();
        for (rows, name) in [(0, "r.json"), (2, "r-2.json")] {
            let mut writing = Writing::begin(&destination, r#"{"a":{"b":1}}"#, &Signals::unheard()).unwrap();
            for n in 0..rows {
                writing.row(&format!("{{\"turn\":{n}}}\n")).unwrap();
            }
            let saved = writing.finish().unwrap();
            assert_eq!((&saved.path, saved.moved.is_none()), (&dir.path().join(name), true));
            let value: serde_json::Value =
                serde_json::from_str(&std::fs::read_to_string(&saved.path).unwrap()).unwrap();
            assert_eq!(value["a"]["b"], 1);
            assert_eq!(value["raw_metrics"].as_array().unwrap().len(), rows);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_result_whose_folder_is_gone_is_saved_whole_elsewhere() {
        for rows in [1, 5000] {
            let dir = tempfile::tempdir().unwrap();
            let name = format!("benchctl-test-{}-{rows}.json", std::process::id());
            let destination = choose(&output(Some(&dir.path().join(&name)), None, false)).unwrap().unwrap();
            let mut writing = Writing::begin(&destination, r#"{"a":1}"#, &Signals::unheard()).unwrap();
            // More than what is gathered is in the file by then.
            for n in 0..rows {
                writing.row(&format!("{{\"turn\":{n},\"padding\":\"0123456789\"}}\n")).unwrap();
            }
            std::fs::remove_dir_all(dir.path()).unwrap();
            let saved = writing.finish().unwrap();
            assert_eq!(saved.path, std::env::temp_dir().join(&name));
            assert_eq!(saved.moved.unwrap().kind(), io::ErrorKind::NotFound);
            let text = std::fs::read_to_string(&saved.path).unwrap();
            std::fs::remove_file(&saved.path).unwrap();
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value["raw_metrics"].as_array().unwrap().len(), rows);
            assert_eq!(value["raw_metrics"][rows - 1]["turn"], rows - 1);
        }
    }

    #[test]
    fn a_forced_file_is_replaced_through_its_link() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target.json"), dir.path().join("link.json"));
        std::fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let destination = choose(&output(Some(&link), None, true)).unwrap().unwrap();
        Writing::begin(&destination, "{\"a\":1}", &Signals::unheard()).unwrap().finish().unwrap();
        assert!(link.is_symlink());
        assert!(std::fs::read_to_string(&target).unwrap().contains("raw_metrics"));
    }

    // From `date -u -d @N +%Y%m%dT%H%M%SZ`.
    #[test]
    fn times_are_utc() {
        for (epoch_s, want) in [
            (0, "19700101T000000Z"),
            (951_782_399, "20000228T235959Z"),
            (951_782_400, "20000229T000000Z"),
            (1_764_566_052, "20251201T051412Z"),
        ] {
            assert_eq!(utc(epoch_s), want);
        }
        let load = Load::Open {
            request_rate_per_s: 2.5,
            duration_s: 1.0,
            warm_up_s: 0.0,
            arrival: proto::plan::Arrival::Constant,
            max_concurrency: None,
            max_in_flight: 1,
            drain_timeout_s: 1.0,
        };
        assert_eq!(
            name_of(&load, UNIX_EPOCH + Duration::from_secs(1)),
            "benchd-open-r2.5-19700101T000001Z.json"
        );
    }
}
