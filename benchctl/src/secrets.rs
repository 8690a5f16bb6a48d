//! Keeps secrets out of argument lists. What stands in ours (`--api-key`, secret headers, user info in a URL) is
//! moved to one environment variable by executing ourselves again, so that `/proc/PID/cmdline` does not show it;
//! from there, and from key files and the usual variables, it goes to the private benchd's standard input.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use proto::wire::Secrets;
use serde::{Deserialize, Serialize};

use crate::exit::Trouble;

/// Carries [`FromArgs`] over the re-execution.
const CARRIER: &str = "BENCHCTL_SECRETS";
/// Variables that hold a key, first one first.
const KEY_VARIABLES: [&str; 2] = ["BENCHD_API_KEY", "OPENAI_API_KEY"];
/// Variables that no child may inherit.
pub const SECRET_VARIABLES: [&str; 3] = [CARRIER, KEY_VARIABLES[0], KEY_VARIABLES[1]];
/// Headers whose value is a secret, beside those that end like [`SECRET_ENDINGS`].
const SECRET_HEADERS: [&str; 5] = ["authorization", "proxy-authorization", "api-key", "x-api-key", "cookie"];
const SECRET_ENDINGS: [&str; 4] = ["-api-key", "-key", "-token", "-secret"];

/// Secrets that stood in the arguments.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FromArgs {
    api_key: Option<String>,
    headers: Vec<(String, String)>,
    /// A proxy URL with user info.
    pub proxy: Option<String>,
}

/// Executes ourselves again, without the secrets, if the arguments hold any. Returns what an execution before
/// this one took out of them.
pub fn take_from(args: &[OsString]) -> Result<FromArgs, Trouble> {
    match split(args)? {
        None => Ok(match std::env::var(CARRIER) {
            Ok(json) => serde_json::from_str(&json)
                .map_err(|_| Trouble::internal(format!("{CARRIER} is not what benchctl wrote there")))?,
            Err(_) => FromArgs::default(),
        }),
        Some((clean, secrets)) => Err(match execute_again(&clean, &secrets) {
            Ok(never) => match never {},
            Err(error) => Trouble::internal(format!(
                "benchctl could not execute itself again to hide the secrets of its arguments ({error}); put them \
                 into --api-key-file or BENCHD_API_KEY"
            )),
        }),
    }
}

fn execute_again(args: &[OsString], secrets: &FromArgs) -> std::io::Result<Infallible> {
    let json = serde_json::to_string(secrets)?;
    let (name, rest) = args.split_first().ok_or(std::io::ErrorKind::InvalidInput)?;
    Err(Command::new(std::env::current_exe()?).arg0(name).args(rest).env(CARRIER, json).exec())
}

/// The arguments without their secrets, and the secrets; `None` when there are none.
fn split(args: &[OsString]) -> Result<Option<(Vec<OsString>, FromArgs)>, Trouble> {
    let mut clean = Vec::with_capacity(args.len());
    let mut secrets = FromArgs::default();
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        // `--flag VALUE` and `--flag=VALUE` alike; what is not text holds no secret that we know.
        let text = arg.to_str().unwrap_or_default();
        let (flag, mut value) = match text.split_once('=') {
            Some((flag, value)) if flag.starts_with('-') => (flag, Some(value.to_owned())),
            _ => (text, None),
        };
        let is_joined = value.is_some();
        let takes_url = takes_url(flag);
        if (takes_url || matches!(flag, "--api-key" | "--header" | "--proxy")) && !is_joined {
            value = rest.next().map(|next| next.to_string_lossy().into_owned());
        }
        match (flag, value) {
            ("--api-key", Some(key)) => {
                if key.is_empty() {
                    return Err(Trouble::usage("--api-key must not be empty"));
                }
                secrets.api_key = Some(key);
            }
            ("--header", Some(header)) if is_secret_header(&header) => {
                let Some((name, value)) = header.split_once(':') else {
                    return Err(Trouble::usage("a --header must read 'Name: value'; this one has no colon"));
                };
                secrets.headers.push((name.trim().to_owned(), value.trim().to_owned()));
            }
            ("--proxy", Some(url)) => {
                let (bare, user_info) = split_user_info(&url);
                clean.push(format!("--proxy={bare}").into());
                if user_info.is_some() {
                    secrets.proxy = Some(url);
                }
            }
            ("--header", Some(header)) => clean.push(format!("--header={header}").into()),
            ("--api-key" | "--header" | "--proxy", None) => clean.push(arg.clone()),
            (flag, Some(url)) if takes_url => {
                let (bare, user_info) = split_user_info(&url);
                if is_joined {
                    clean.push(format!("{flag}={bare}").into());
                } else {
                    clean.extend([flag.into(), bare.into()]);
                }
                secrets.headers.extend(user_info.as_deref().map(basic));
            }
            // `-uURL`, alone or after other short flags.
            _ if is_short(text) && text.contains('u') => {
                let (bare, user_info) = split_user_info(text);
                clean.push(bare.into());
                secrets.headers.extend(user_info.as_deref().map(basic));
            }
            _ => clean.push(arg.clone()),
        }
    }
    let found = secrets != FromArgs::default();
    Ok(found.then_some((clean, secrets)))
}

/// Whether a URL follows: `-u`, alone or after other short flags, and its long names.
fn takes_url(flag: &str) -> bool {
    matches!(flag, "--url" | "--base-url")
        || (is_short(flag) && flag.ends_with('u') && flag[1..].bytes().all(|b| b.is_ascii_lowercase()))
}

fn is_short(flag: &str) -> bool {
    flag.starts_with('-') && !flag.starts_with("--")
}

/// Whether a header, as `Name: value` or a slip of it, holds a secret.
fn is_secret_header(header: &str) -> bool {
    let name = header.split([':', '=', ' ']).next().unwrap_or_default().trim().to_ascii_lowercase();
    SECRET_HEADERS.contains(&name.as_str()) || SECRET_ENDINGS.iter().any(|end| name.ends_with(end))
}

/// A text that holds a URL, without the URL's user info, and the user info, decoded.
pub fn split_user_info(text: &str) -> (String, Option<String>) {
    let Some(scheme_end) = text.find("://").map(|at| at + 3) else {
        return (text.to_owned(), None);
    };
    let rest = &text[scheme_end..];
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    match authority.rfind('@') {
        None => (text.to_owned(), None),
        Some(at) => {
            (format!("{}{}", &text[..scheme_end], &rest[at + 1..]), Some(percent_decoded(&rest[..at])))
        }
    }
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let decoded = (*first == b'%')
            .then(|| tail.get(..2))
            .flatten()
            .and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match decoded {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn basic(user_info: &str) -> (String, String) {
    let pair = if user_info.contains(':') { user_info.to_owned() } else { format!("{user_info}:") };
    ("Authorization".to_owned(), format!("Basic {}", BASE64_STANDARD.encode(pair)))
}

/// All secrets of a run: what the arguments held, user info of a URL from elsewhere, the key file, and the key
/// variables, in this order of precedence.
pub fn gather(
    from_args: &FromArgs,
    url_user_info: Option<&str>,
    key_file: Option<&Path>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Secrets, Trouble> {
    let mut headers = from_args.headers.clone();
    headers.extend(url_user_info.map(basic));
    let authorizations =
        headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("authorization")).count();
    let named = usize::from(from_args.api_key.is_some()) + usize::from(key_file.is_some()) + authorizations;
    if named > 1 {
        return Err(Trouble::usage(
            "give one of --api-key, --api-key-file, a header 'Authorization' and user info in the URL, not several",
        ));
    }
    let api_key = match (&from_args.api_key, key_file) {
        (Some(key), _) => Some(key.clone()),
        (None, Some(path)) => Some(key_in(path)?),
        // An explicit authorization stands over a variable that happens to be set.
        (None, None) if authorizations > 0 => None,
        (None, None) => KEY_VARIABLES
            .iter()
            .filter_map(|name| variable(name))
            .filter_map(|key| key.into_string().ok())
            .map(|key| key.trim().to_owned())
            .find(|key| !key.is_empty()),
    };
    Ok(Secrets { api_key, headers })
}

fn key_in(path: &Path) -> Result<String, Trouble> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Trouble::usage(format!("the key file {} cannot be read: {e}", path.display())))?;
    match text.trim() {
        "" => Err(Trouble::usage(format!("the key file {} is empty", path.display()))),
        key => Ok(key.to_owned()),
    }
}

/// Takes from a child's environment what only we need.
pub fn keep_from(command: &mut Command) {
    for name in SECRET_VARIABLES {
        command.env_remove(OsStr::new(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_words(line: &str) -> Option<(Vec<String>, FromArgs)> {
        let args: Vec<OsString> = shlex::split(line).unwrap().into_iter().map(OsString::from).collect();
        split(&args).unwrap().map(|(clean, secrets)| {
            (clean.into_iter().map(|arg| arg.into_string().unwrap()).collect(), secrets)
        })
    }

    #[test]
    fn arguments_without_secrets_stay() {
        let line = "benchctl run -u http://h:8000/v1?a=b@c --header 'X-Team: a@b' -m http://me:you@h";
        assert!(split_words(line).is_none());
        assert!(split_words("benchctl --extra-body '{\"url\":\"http://me:you@h\"}'").is_none());
    }

    #[test]
    fn secrets_leave_the_arguments_in_every_spelling() {
        for line in [
            "benchctl --api-key hunter2 -m x",
            "benchctl --api-key=hunter2 -m x",
            "benchctl --header 'Authorization: Bearer hunter2' -m x",
            "benchctl --header='X-API-KEY:hunter2' -m x",
            "benchctl --header 'x-gateway-token: hunter2' -m x",
            "benchctl --proxy http://me:hunter2@proxy:80 -m x",
        ] {
            let (clean, secrets) = split_words(line).unwrap();
            assert!(!clean.join(" ").contains("hunter2"), "{clean:?}");
            assert!(clean.ends_with(&["-m".to_owned(), "x".to_owned()]), "{clean:?}");
            assert!(serde_json::to_string(&secrets).unwrap().contains("hunter2"));
        }
    }

    #[test]
    fn user_info_becomes_a_basic_header() {
        for url in [
            "-u http://me:pass%3Aword@h:1/v1",
            "-su http://me:pass%3Aword@h:1/v1",
            "-suhttp://me:pass%3Aword@h:1/v1",
            "-u=http://me:pass%3Aword@h:1/v1",
            "--base-url=http://me:pass%3Aword@h:1/v1",
        ] {
            let (clean, secrets) = split_words(&format!("benchctl {url}")).unwrap();
            assert!(clean.last().unwrap().ends_with("http://h:1/v1"), "{clean:?}");
            assert_eq!(secrets.headers, [("Authorization".into(), "Basic bWU6cGFzczp3b3Jk".into())]);
        }
    }

    #[test]
    fn a_secret_header_without_a_colon_is_refused_without_showing_it() {
        let args = ["benchctl", "--header", "Authorization Bearer hunter2"].map(OsString::from);
        let Err(trouble) = split(&args) else { panic!("it was taken") };
        assert!(!trouble.message.contains("hunter2"));
    }

    #[test]
    fn an_explicit_key_stands_over_a_variable_and_two_explicit_ones_are_refused() {
        let env = |name: &str| (name == "OPENAI_API_KEY").then(|| OsString::from("from-env\n"));
        let none = FromArgs::default();
        assert_eq!(gather(&none, None, None, env).unwrap().api_key.unwrap(), "from-env");
        assert_eq!(gather(&none, Some("me:pw"), None, env).unwrap().api_key, None);
        let given = FromArgs { api_key: Some("given".into()), ..FromArgs::default() };
        assert_eq!(gather(&given, None, None, env).unwrap().api_key.unwrap(), "given");
        assert!(gather(&given, Some("me:pw"), None, env).is_err());
        assert!(gather(&given, None, Some(Path::new("/nowhere")), env).is_err());
    }
}
