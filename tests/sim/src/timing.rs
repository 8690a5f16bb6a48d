//! When each token of a reply is due, as offsets from the request's start. Pure.

use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use crate::clock::to_ns;
use crate::options::{Shape, TimeOptions};

const MS: f64 = 1e6;
const US: f64 = 1e3;

/// Instant of each of `tokens` tokens, in ns from the start; they never decrease.
///
/// token 0 = (ttft + prefill · uncached) · f, token k = token k−1 + itl · f, with one f a request. Summed in
/// floating point and rounded once, so that nothing drifts.
pub(crate) fn offsets_ns(
    options: &TimeOptions,
    rng: &mut ChaCha8Rng,
    uncached: u32,
    tokens: usize,
) -> Vec<u64> {
    let factor = draw(Shape::Lognormal, 1.0, options.time_sigma, rng);
    let prefill_ms = options.prefill_us_per_token * f64::from(uncached) * US / MS;
    let mut at_ms = (draw(options.ttft_dist, options.ttft_ms, options.ttft_sigma, rng) + prefill_ms) * factor;
    (0..tokens)
        .map(|token| {
            if token > 0 {
                at_ms += draw(options.itl_dist, options.itl_ms, options.itl_sigma, rng) * factor;
            }
            to_ns(at_ms, MS)
        })
        .collect()
}

/// Times in which nothing is written: --stall-ms long, every --stall-every-s from the start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stalls {
    origin_ns: u64,
    every_ns: u64,
    length_ns: u64,
}

impl Stalls {
    pub(crate) fn new(options: &TimeOptions, origin_ns: u64) -> Self {
        let every_ns = to_ns(options.stall_every_s, 1e9).max(1);
        Self { origin_ns, every_ns, length_ns: to_ns(options.stall_ms, MS).min(every_ns) }
    }

    /// Whether there are any.
    pub(crate) fn is_none(&self) -> bool {
        self.length_ns == 0
    }

    /// When something is written that is due at `due_ns`: then, or at the end of the stall that it falls into.
    pub(crate) fn moved(&self, due_ns: u64) -> u64 {
        let age_ns = due_ns.saturating_sub(self.origin_ns);
        let since_ns = age_ns % self.every_ns;
        // The first stall begins after one whole period.
        if age_ns < self.every_ns || since_ns >= self.length_ns {
            due_ns
        } else {
            due_ns - since_ns + self.length_ns
        }
    }
}

/// `middle` is the mean of a normal and the median of a lognormal.
fn draw(shape: Shape, middle: f64, sigma: f64, rng: &mut ChaCha8Rng) -> f64 {
    let mut z = || -> f64 { StandardNormal.sample(rng) };
    match shape {
        Shape::Fixed => middle,
        Shape::Normal => (middle * (1.0 + sigma * z())).max(0.0),
        Shape::Lognormal => middle * (sigma * z()).exp(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rand::SeedableRng;

    use super::*;

    fn options(args: &[&str]) -> TimeOptions {
        TimeOptions::try_parse_from([&["times"], args].concat()).unwrap()
    }

    fn rng(seed: u64) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(seed)
    }

    #[test]
    fn fixed_times_are_exact_and_do_not_drift() {
        let times = options(&["--ttft-ms", "20", "--prefill-us-per-token", "10", "--itl-ms", "1.3"]);
        let at = offsets_ns(&times, &mut rng(1), 500, 10_001);
        assert_eq!(at[0], 25_000_000);
        assert!(at[10_000].abs_diff(25_000_000 + 13_000_000_000) <= 1);
    }

    #[test]
    fn a_normal_has_its_mean_and_spread() {
        let times =
            options(&["--ttft-ms", "0", "--itl-ms", "5", "--itl-dist", "normal", "--itl-sigma", "0.1"]);
        let at = offsets_ns(&times, &mut rng(2), 0, 20_001);
        let gaps: Vec<f64> = at.windows(2).map(|w| (w[1] - w[0]) as f64 / MS).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let deviation = (gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        assert!((mean - 5.0).abs() < 0.02 && (deviation - 0.5).abs() < 0.02, "{mean} {deviation}");
    }

    #[test]
    fn a_lognormal_has_its_median_and_sigma() {
        let times =
            options(&["--prefill-us-per-token", "0", "--ttft-dist", "lognormal", "--ttft-sigma", "0.5"]);
        let mut rng = rng(3);
        let mut firsts: Vec<u64> = (0..20_000).map(|_| offsets_ns(&times, &mut rng, 9, 1)[0]).collect();
        firsts.sort_unstable();
        let permyriad = |at: usize| firsts[at * 2] as f64 / MS;
        assert!((permyriad(5000) - 20.0).abs() < 0.3, "{}", permyriad(5000));
        assert!((permyriad(8413) / 20.0 - 0.5f64.exp()).abs() < 0.05, "{}", permyriad(8413));
    }

    #[test]
    fn one_factor_scales_all_times_of_a_request() {
        let times = options(&["--time-sigma", "1"]);
        let at = offsets_ns(&times, &mut rng(4), 0, 3);
        let factor = at[0] as f64 / (20.0 * MS);
        assert!((factor - 1.0).abs() > 1e-3);
        assert!((at[2] - at[1]).abs_diff(to_ns(5.0 * factor, MS)) <= 2);
    }

    #[test]
    fn what_falls_into_a_stall_comes_at_its_end() {
        let stalls = Stalls::new(&options(&["--stall-ms", "100", "--stall-every-s", "2"]), 1_000);
        let at = |ms: u64| (stalls.moved(1_000 + ms * 1_000_000) - 1_000) / 1_000_000;
        assert_eq!(
            [0, 50, 1999, 2000, 2001, 2099, 2100, 4099].map(at),
            [0, 50, 1999, 2100, 2100, 2100, 2100, 4100]
        );
        assert!(Stalls::new(&options(&[]), 0).is_none());
    }

    #[test]
    fn wide_spreads_never_go_back_in_time() {
        let times = options(&["--itl-dist", "normal", "--itl-sigma", "3"]);
        assert!(offsets_ns(&times, &mut rng(5), 0, 1000).is_sorted());
    }
}
