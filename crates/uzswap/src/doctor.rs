//! `uzswap doctor`: the findings of [`uzswap_vm::doctor`] as text or JSON. Meaning never hangs on colour: there is none.

use serde_json::json;
use uzswap_vm::doctor::{Check, Place, State, checks, surroundings};

use crate::print;

/// Prints the findings; the status is 0 if jobs can run, else 1.
pub fn doctor(as_json: bool, all: bool) -> i32 {
    let (checks, places) = (checks(), surroundings());
    let fit = checks.iter().all(|check| check.state != State::Fail);
    let written =
        print(&if as_json { json_report(&checks, &places, fit, all) } else { report(&checks, &places, fit, all) });
    if written != 0 { written } else { i32::from(!fit) }
}

fn word(state: State) -> &'static str {
    match state {
        State::Ok => "ok",
        State::Warn => "warn",
        State::Fail => "FAIL",
    }
}

fn json_report(checks: &[Check], places: &[Place], fit: bool, all: bool) -> String {
    let checks: Vec<_> = checks
        .iter()
        .map(|check| {
            let remedies = check.remedies.iter().filter(|remedy| all || places.contains(&remedy.place));
            let remedies: Vec<_> =
                remedies.map(|remedy| json!({ "place": remedy.place.to_string(), "text": remedy.text })).collect();
            let state = word(check.state).to_lowercase();
            json!({ "name": check.name, "state": state, "finding": check.finding, "remedies": remedies })
        })
        .collect();
    let places: Vec<_> = places.iter().map(Place::to_string).collect();
    let report = json!({ "run_will_work": fit, "surroundings": places, "checks": checks });
    format!("{report:#}\n")
}

fn report(checks: &[Check], places: &[Place], fit: bool, all: bool) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        text += &format!("{:<4}  {:<width$}  {}\n", word(check.state), check.name, check.finding);
    }
    for check in checks.iter().filter(|check| !check.remedies.is_empty()) {
        let heading = if check.state == State::Fail { "to make it run" } else { "to make it better" };
        text += &format!("\n{} ({heading}):\n", check.name);
        for remedy in check.remedies.iter().filter(|remedy| all || places.contains(&remedy.place)) {
            let indented = remedy.text.replace('\n', &format!("\n{:14}", ""));
            text += &format!("  {:<10}  {indented}\n", remedy.place);
        }
    }
    text += if fit { "\nuzswap run will work here.\n" } else { "\nuzswap run will NOT work here.\n" };
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_vm::doctor::Remedy;

    fn sick() -> Vec<Check> {
        let remedy = |place, text: &str| Remedy { place, text: text.into() };
        vec![
            Check { name: "kernel", state: State::Ok, finding: "Linux 6.18".into(), remedies: vec![] },
            Check {
                name: "userfaultfd",
                state: State::Fail,
                finding: "no full mode".into(),
                remedies: vec![remedy(Place::Docker, "docker run X"), remedy(Place::Kubernetes, "one:\n  two")],
            },
        ]
    }

    #[test]
    fn text_is_aligned_and_shows_the_remedies_of_the_place() {
        let text = report(&sick(), &[Place::Docker], false, false);
        assert!(text.contains("ok    kernel       Linux 6.18\nFAIL  userfaultfd  no full mode\n"), "{text}");
        assert!(text.contains("docker run X") && !text.contains("kubernetes"), "{text}");
        assert!(text.ends_with("will NOT work here.\n"));
        let all = report(&sick(), &[Place::Docker], false, true);
        assert!(all.contains("  kubernetes  one:\n                two\n"), "{all}");
    }

    #[test]
    fn json_says_the_same() {
        let text = json_report(&sick(), &[Place::Docker], false, false);
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["run_will_work"], false);
        assert_eq!(value["checks"][1]["state"], "fail");
        assert_eq!(value["checks"][1]["remedies"].as_array().map(Vec::len), Some(1));
    }
}
