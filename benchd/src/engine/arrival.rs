//! When the slots of an open loop fall due: an endless plan cut off at the duration, fixed before the first request
//! by rate, kind of arrival and seed. Gives instants in ns from the origin; the pacer sleeps to them.

use proto::plan::Arrival;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rand_distr::{Distribution, Gamma};

const NS_PER_S: f64 = 1e9;
/// Keeps this use of the seed apart from every other.
const SEED_PURPOSE: &[u8] = b"arrival";
/// Burstiness that a smaller one is taken as: below it all but one gap in a million are 0 anyway, and the gamma
/// distribution's parameters leave the range of numbers.
const LEAST_BURSTINESS: f64 = 1e-6;

/// The due instants of an open loop, in order: ns from the origin, all below the duration.
///
/// Constant: slot i (from 0) is due at i / rate, rounded to the nearest ns from the exact quotient, so that no error
/// adds up. Poisson and gamma: every gap is drawn, the first included, so that slot 0 is due at the first gap and the
/// mean number of slots is rate · duration.
///
/// The same arguments give the same instants. Constant and Poisson use nothing but IEEE arithmetic and are the same on
/// every platform; gamma goes through the platform's `ln` and `powf`, and could differ by 1 ns between platforms.
#[derive(Clone, Debug)]
pub struct Slots {
    end_ns: i64,
    gaps: Gaps,
}

#[derive(Clone, Debug)]
enum Gaps {
    /// Slot `next` is due at `next · ns_per_slot`.
    Constant {
        next: u64,
        ns_per_slot: Fraction,
    },
    Drawn {
        at: Elapsed,
        mean_ns: f64,
        shape: Shape,
        rng: Box<ChaCha8Rng>,
    },
    /// No slot is left.
    Over,
}

/// A gap's distribution with mean 1.
#[derive(Clone, Copy, Debug)]
enum Shape {
    Exponential,
    Gamma(Gamma<f64>),
}

/// Sum of the gaps so far. The part below a ns is kept apart, so that it is as fine after a year as at the start.
#[derive(Clone, Copy, Debug, Default)]
struct Elapsed {
    ns: i64,
    below: f64,
}

/// A positive number of ns as numerator / denominator, exactly.
#[derive(Clone, Copy, Debug)]
struct Fraction {
    numerator: u128,
    denominator: u128,
}

impl Slots {
    /// Slots at `rate_per_s` until `duration_s` (infinity: no end), spaced as `arrival` says. A rate or duration that
    /// is not above 0 gives none.
    #[must_use]
    pub fn new(rate_per_s: f64, duration_s: f64, arrival: Arrival, seed: u64) -> Self {
        let end_ns = whole_ns(duration_s * NS_PER_S);
        let gaps = match arrival {
            _ if !rate_per_s.is_finite() || rate_per_s <= 0.0 => Gaps::Over,
            Arrival::Constant => match Fraction::ns_per_slot(rate_per_s) {
                Some(ns_per_slot) => Gaps::Constant { next: 0, ns_per_slot },
                None => Gaps::Over,
            },
            Arrival::Poisson => Gaps::drawn(rate_per_s, Shape::Exponential, seed),
            Arrival::Gamma { burstiness } => {
                let shape = burstiness.max(LEAST_BURSTINESS);
                match Gamma::new(shape, 1.0 / shape) {
                    Ok(gamma) => Gaps::drawn(rate_per_s, Shape::Gamma(gamma), seed),
                    Err(_) => Gaps::Over,
                }
            }
        };
        Slots { end_ns, gaps }
    }
}

impl Iterator for Slots {
    type Item = i64;

    fn next(&mut self) -> Option<i64> {
        let due = self.gaps.next_due().filter(|&due| due < self.end_ns);
        if due.is_none() {
            self.gaps = Gaps::Over;
        }
        due
    }
}

impl std::iter::FusedIterator for Slots {}

impl Gaps {
    fn drawn(rate_per_s: f64, shape: Shape, seed: u64) -> Self {
        Gaps::Drawn {
            at: Elapsed::default(),
            mean_ns: NS_PER_S / rate_per_s,
            shape,
            rng: Box::new(ChaCha8Rng::from_seed(key(seed))),
        }
    }

    /// `None` when no slot is left, or the instant is past all that an i64 holds.
    fn next_due(&mut self) -> Option<i64> {
        match self {
            Gaps::Constant { next, ns_per_slot } => {
                let due = ns_per_slot.times(*next)?;
                *next += 1;
                Some(due)
            }
            Gaps::Drawn { at, mean_ns, shape, rng } => {
                let gap = match shape {
                    Shape::Exponential => exponential(rng.next_u64()),
                    Shape::Gamma(gamma) => gamma.sample(rng),
                };
                at.add(gap * *mean_ns)?;
                Some(at.ns)
            }
            Gaps::Over => None,
        }
    }
}

impl Elapsed {
    fn add(&mut self, gap_ns: f64) -> Option<()> {
        let sum = self.below + gap_ns;
        self.ns = self.ns.checked_add(whole_ns(sum))?;
        self.below = sum.fract();
        Some(())
    }
}

impl Fraction {
    /// 10⁹ / rate. A float is a whole number times a power of two, so this is exact. `None` for rates so far from all
    /// that a plan may ask for that it does not fit.
    fn ns_per_slot(rate_per_s: f64) -> Option<Self> {
        let (mut numerator, mut denominator) = (1_000_000_000_u128, rate_per_s);
        while denominator.fract() != 0.0 {
            denominator *= 2.0;
            numerator = numerator.checked_mul(2)?;
        }
        Some(Fraction { numerator, denominator: whole(denominator)? })
    }

    /// The nearest whole number to `count` times this; `None` past the end of i64.
    fn times(self, count: u64) -> Option<i64> {
        let product = self.numerator.checked_mul(u128::from(count))?;
        i64::try_from(product.checked_add(self.denominator / 2)? / self.denominator).ok()
    }
}

/// A ChaCha key of the seed and what it is used for.
fn key(seed: u64) -> [u8; 32] {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..8 + SEED_PURPOSE.len()].copy_from_slice(SEED_PURPOSE);
    key
}

/// −ln of a uniform number in (0, 1].
fn exponential(bits: u64) -> f64 {
    let uniform = ((bits >> 11) + 1) as f64 / (1_u64 << 53) as f64;
    -ln(uniform)
}

/// The natural logarithm of a normal positive number, from plain IEEE arithmetic, because `f64::ln` may differ in its
/// last digit between platforms. Accurate to a few units in the last place.
fn ln(x: f64) -> f64 {
    // x = mantissa · 2^exponent, the mantissa in [1/√2, √2).
    let (mut mantissa, mut exponent) = (x, 0.0);
    while mantissa < std::f64::consts::FRAC_1_SQRT_2 {
        mantissa *= 2.0;
        exponent -= 1.0;
    }
    while mantissa >= std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1.0;
    }
    // ln m = 2·artanh z = 2·(z + z³/3 + z⁵/5 + …) with |z| ≤ 0.172: twelve terms leave less than 10⁻¹⁹.
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let series = (0..12).rev().fold(0.0, |sum, i| sum * z * z + 1.0 / f64::from(2 * i + 1));
    2.0 * z * series + exponent * std::f64::consts::LN_2
}

/// The whole part; what is beyond i64 stops at its ends.
#[expect(
    clippy::cast_possible_truncation,
    reason = "cutting off the fraction is the purpose, and the cast saturates"
)]
fn whole_ns(ns: f64) -> i64 {
    ns as i64
}

/// A whole float as an integer, where it fits.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked first")]
fn whole(value: f64) -> Option<u128> {
    (1.0..1e30).contains(&value).then_some(value as u128)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const YEAR_S: f64 = 31_536_000.0;

    fn gaps_s(arrival: Arrival, rate: f64, count: usize, seed: u64) -> Vec<f64> {
        let slots = Slots::new(rate, f64::INFINITY, arrival, seed).take(count);
        let mut before = 0;
        slots.map(|due| (due - std::mem::replace(&mut before, due)) as f64 / NS_PER_S).collect()
    }

    fn mean_and_cv(gaps: &[f64]) -> (f64, f64) {
        let n = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / n;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / (n - 1.0);
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn constant_slots_start_at_0_and_end_before_the_duration() {
        let due: Vec<i64> = Slots::new(4.0, 1.0, Arrival::Constant, 0).collect();
        assert_eq!(due, [0, 250_000_000, 500_000_000, 750_000_000]);
        let due: Vec<i64> = Slots::new(3.0, 1.0, Arrival::Constant, 0).collect();
        assert_eq!(due, [0, 333_333_333, 666_666_667]);
        // As a float 0.1 is a little more than a tenth; the slot at 10 s is not due in 10 s all the same.
        assert_eq!(Slots::new(0.1, 10.0, Arrival::Constant, 0).count(), 1);
        assert_eq!(Slots::new(300.0, 20.0, Arrival::Constant, 0).count(), 6000);
    }

    #[test]
    fn a_million_a_second_is_exact_after_a_year() {
        let mut slots = Slots::new(1e6, YEAR_S, Arrival::Constant, 0);
        let Gaps::Constant { next, .. } = &mut slots.gaps else { unreachable!() };
        *next = 31_536_000_000_000 - 2;
        let last: Vec<i64> = slots.collect();
        assert_eq!(last, [31_535_999_999_998_000, 31_535_999_999_999_000]);
        // So are rates that no decimal holds; a 64-bit float could not tell these 3 ns.
        let seventh = Fraction::ns_per_slot(1e6 / 7.0).unwrap().times(4_505_142_857_143).unwrap();
        assert_eq!(seventh, 31536000000000997);
        let one_in_12_days = 1.0 / 1_048_576.0;
        let due: Vec<i64> = Slots::new(one_in_12_days, 2e6, Arrival::Constant, 0).collect();
        assert_eq!(due, [0, 1_048_576_000_000_000]);
    }

    #[test]
    fn senseless_rates_give_no_slot_and_no_panic() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            for arrival in [Arrival::Constant, Arrival::Poisson] {
                assert!(Slots::new(rate, 0.0, arrival, 0).next().is_none(), "{rate}");
            }
        }
        assert!(Slots::new(1e-300, 1e9, Arrival::Poisson, 0).next().is_none());
        assert!(Slots::new(1.0, f64::NAN, Arrival::Poisson, 0).next().is_none());
        for burstiness in [1e-320, 1e6] {
            assert!(Slots::new(10.0, 10.0, Arrival::Gamma { burstiness }, 0).count() < 10_000_000);
        }
    }

    #[test]
    fn the_schedule_of_a_seed_is_the_same_everywhere() {
        // Golden: another value here means that saved seeds no longer mean what they meant.
        let due: Vec<i64> = Slots::new(100.0, 1.0, Arrival::Poisson, 7).take(4).collect();
        assert_eq!(due, [53_041_089, 55_866_428, 64_296_486, 80_687_509]);
        let due: Vec<i64> = Slots::new(100.0, 1.0, Arrival::Gamma { burstiness: 0.5 }, 7).take(4).collect();
        assert_eq!(due, [989, 2_387_313, 4_237_288, 7_986_497]);
    }

    #[test]
    fn drawn_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness() {
        let shapes = [
            (Arrival::Poisson, 1.0),
            (Arrival::Gamma { burstiness: 1.0 }, 1.0),
            (Arrival::Gamma { burstiness: 0.25 }, 2.0),
            (Arrival::Gamma { burstiness: 4.0 }, 0.5),
            (Arrival::Gamma { burstiness: 100.0 }, 0.1),
        ];
        for (arrival, cv_wanted) in shapes {
            let (mean, cv) = mean_and_cv(&gaps_s(arrival, 200.0, 400_000, 3));
            assert!((mean * 200.0 - 1.0).abs() < 0.012, "{arrival:?}: mean {mean}");
            assert!((cv / cv_wanted - 1.0).abs() < 0.02, "{arrival:?}: cv {cv}");
        }
    }

    #[test]
    fn poisson_gaps_are_exponential_and_the_first_is_drawn_too() {
        let gaps = gaps_s(Arrival::Poisson, 1.0, 200_000, 5);
        for t in [0.1, 0.5, 1.0, 2.0, 4.0] {
            let share = gaps.iter().filter(|&&g| g > t).count() as f64 / gaps.len() as f64;
            assert!((share - (-t).exp()).abs() < 0.005, "share above {t}: {share}");
        }
        let firsts: Vec<f64> = (0..20_000).map(|seed| gaps_s(Arrival::Poisson, 1.0, 1, seed)[0]).collect();
        let (mean, cv) = mean_and_cv(&firsts);
        assert!((mean - 1.0).abs() < 0.03 && (cv - 1.0).abs() < 0.03, "mean {mean}, cv {cv}");
    }

    #[test]
    fn fractions_of_a_ns_are_not_lost_over_time() {
        let count = 3_000_000;
        let last =
            Slots::new(1e6, f64::INFINITY, Arrival::Gamma { burstiness: 1e6 }, 1).nth(count - 1).unwrap();
        assert!((last as f64 / (count as f64 * 1000.0) - 1.0).abs() < 1e-5, "{last}");
    }

    fn any_arrival() -> impl Strategy<Value = Arrival> {
        prop_oneof![
            Just(Arrival::Constant),
            Just(Arrival::Poisson),
            (0.05..50.0).prop_map(|burstiness| Arrival::Gamma { burstiness }),
        ]
    }

    proptest! {
        #[test]
        fn slots_are_in_order_within_the_duration_and_fixed_by_the_seed(
            rate in 0.1..5_000.0, duration in 0.001..2.0, arrival in any_arrival(), seed: u64)
        {
            let slots = Slots::new(rate, duration, arrival, seed);
            let due: Vec<i64> = slots.clone().collect();
            prop_assert!(due.is_sorted());
            prop_assert!(due.iter().all(|&d| d >= 0 && (d as f64) < duration * NS_PER_S));
            prop_assert_eq!(&due, &slots.collect::<Vec<_>>());
            let other: Vec<i64> = Slots::new(rate, duration, arrival, seed ^ 1).collect();
            prop_assert!(arrival == Arrival::Constant || due.is_empty() || due != other);
            // A longer plan begins with the shorter one.
            let longer: Vec<i64> = Slots::new(rate, duration * 2.0, arrival, seed).collect();
            prop_assert_eq!(&longer[..due.len()], &due[..]);
        }

        #[test]
        fn constant_slots_never_drift_from_the_rate(rate in 0.001..1e6, slot in 0..1_000_000_u32) {
            let due = Fraction::ns_per_slot(rate).unwrap().times(u64::from(slot)).unwrap();
            let exact = f64::from(slot) * NS_PER_S / rate;
            prop_assert!((due as f64 - exact).abs() <= 0.5 + exact * 1e-15, "{} is not {}", due, exact);
            let duration = f64::from(slot % 1000) / rate;
            let count = Slots::new(rate, duration, Arrival::Constant, 0).count();
            prop_assert_eq!(count, slot as usize % 1000);
        }

        #[test]
        fn our_logarithm_is_the_logarithm(x in 1e-16..1.0_f64) {
            prop_assert!((ln(x) - x.ln()).abs() <= 4.0 * f64::EPSILON * (x.ln().abs() + 1e-300).max(f64::EPSILON));
        }
    }
}
